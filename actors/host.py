"""Workers and servers as Ray hosts them: joined to their groups when a run starts."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from raypar.actors import groups
from raypar.actors.cut import Cut
from raypar.actors.group import Group
from raypar.actors.ledger import Ledger
from raypar.actors.member import Member
from raypar.actors.memory import keep_freed_memory
from raypar.actors.plan import Plan
from raypar.actors.server import Server
from raypar.actors.worker import Worker


class Hosted:
    """A Member inside a Ray actor, which has its public methods.

    Not a Member itself: Ray wraps every method of an actor's class, and a step makes a hundred calls of one by another.
    """

    kind: ClassVar[type[Member]]

    def __init__(self) -> None:
        self._member, self._joined = self.kind(), dict[str, Group]()
        keep_freed_memory()
        gc.freeze()  # the collector need not look at all of torch again and again

    def start(self, plan: Plan) -> dict[str, Cut]:
        """Leave the groups of an earlier run, join those of this one, build; returns what is held of the parameters."""
        for group in self._joined.values():
            groups.leave(group.name)
        ledger, self._joined = Ledger(), {}
        device = self._member.prepare(plan).device
        for key, axis, name, members in plan.world.memberships(plan.rank):
            rank, full_name = members.index(plan.rank), f"{plan.name}/{name}"
            self._joined[key] = groups.join(full_name, axis, len(members), rank, plan.timeout, ledger, device)
        groups.close_together(self._joined)
        self._member.setup(plan, self._joined)
        gc.collect()  # an earlier run's shared memory
        return self._member.holds()


def _call_of(name: str) -> Callable[..., Any]:
    def call(self: Hosted, *args: Any) -> Any:
        return getattr(self._member, name)(*args)

    return call


def _hosted(kind: type[Member]) -> type[Hosted]:
    methods = {name: _call_of(name) for name, _ in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"}
    return type(f"Hosted{kind.__name__}", (Hosted,), {**methods, "kind": kind, "__module__": __name__})


HostedWorker = _hosted(Worker)
HostedServer = _hosted(Server)
