"""Workers and servers as Ray hosts them: joined to their groups when a run starts."""

from __future__ import annotations

import gc

from raypar.actors import groups
from raypar.actors.cut import Cut
from raypar.actors.group import Group
from raypar.actors.ledger import Ledger
from raypar.actors.member import Member
from raypar.actors.memory import keep_freed_memory
from raypar.actors.plan import Plan
from raypar.actors.server import Server
from raypar.actors.worker import Worker


class Hosted(Member):
    """A Member inside a Ray actor."""

    def __init__(self) -> None:
        super().__init__()
        keep_freed_memory()
        gc.freeze()  # the collector need not look at all of torch again and again

    def start(self, plan: Plan) -> dict[str, Cut]:
        """Leave the groups of an earlier run, join those of this one, build; returns what is held of the parameters."""
        for group in self._groups.values():
            groups.leave(group.name)
        ledger, joined = Ledger(), dict[str, Group]()
        device = self.prepare(plan).device
        for key, axis, name, members in plan.world.memberships(plan.rank):
            rank = members.index(plan.rank)
            joined[key] = groups.join(f"{plan.name}/{name}", axis, len(members), rank, plan.timeout, ledger, device)
        groups.close_together(joined)
        self.setup(plan, joined)
        gc.collect()  # an earlier run's shared memory
        return self.holds()


class HostedWorker(Hosted, Worker):
    """A Worker inside a Ray actor."""


class HostedServer(Hosted, Server):
    """A parameter server inside a Ray actor."""
