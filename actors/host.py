"""The Worker as Ray hosts it: joined to its groups when a run starts."""

from __future__ import annotations

import gc

from raypar.actors import groups
from raypar.actors.group import Group
from raypar.actors.ledger import Ledger
from raypar.actors.memory import keep_freed_memory
from raypar.actors.mesh import AXES
from raypar.actors.plan import Plan
from raypar.actors.worker import Worker


class HostedWorker(Worker):
    """A Worker inside a Ray actor."""

    def __init__(self) -> None:
        super().__init__()
        keep_freed_memory()

    def start(self, plan: Plan) -> dict[str, tuple[int, ...]]:
        """Leave the groups of an earlier run, join those of this one, build; returns the shapes of the parameters."""
        gc.unfreeze()
        for group in getattr(self, "_groups", {}).values():
            groups.leave(group.name)
        ledger, joined = Ledger(), dict[str, Group]()
        for axis in AXES:  # every actor joins in this order, so nobody waits for a group that its peer forms later
            index, members = plan.mesh.group_of(axis, plan.rank)
            if len(members) > 1:
                name = f"{plan.name}/{axis}/{index}"
                joined[axis] = groups.join(name, axis, len(members), members.index(plan.rank), plan.timeout, ledger)
        groups.close_together(joined)
        self.setup(plan, joined)
        gc.collect()
        gc.freeze()  # what is there now stays: the collector need not look at all of torch again and again
        return self.shapes()
