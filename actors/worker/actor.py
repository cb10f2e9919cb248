"""Workers and servers as Ray hosts them: joined to their groups when a run starts."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any

from raypar.actors.collective import ray_groups
from raypar.actors.collective.group import Group
from raypar.actors.collective.ledger import Ledger
from raypar.actors.device import keep_freed_memory
from raypar.actors.sharding import Cut
from raypar.actors.worker.plan import Plan
from raypar.actors.worker.server import Server
from raypar.actors.worker.worker import Worker


class _Hosted:
    """A worker or a server inside a Ray actor, as each run wants it.

    Not a Member itself: Ray wraps every method of an actor's class, and a step makes a hundred calls of one by another.
    """

    def __init__(self) -> None:
        self._member: Worker | Server = Worker()
        self._joined: dict[str, Group] = {}
        keep_freed_memory()
        gc.freeze()  # the collector need not look at all of torch again and again

    def start(self, plan: Plan) -> dict[str, Cut]:
        """Join the groups of a run, build; returns what is held of the parameters."""
        self._member = Server() if plan.rank in plan.world.server_ranks else Worker()
        ledger, device = Ledger(), self._member.prepare(plan).device
        for key, axis, name, members in plan.world.memberships(plan.rank):
            rank, full_name = members.index(plan.rank), f"{plan.name}/{name}"
            self._joined[key] = ray_groups.join(full_name, axis, len(members), rank, plan.run.timeout, ledger, device)
        ray_groups.close_together(self._joined)
        self._member.setup(plan, self._joined)
        return self._member.holds()

    def leave(self) -> None:
        """Leave the groups of a run, and forget all of it."""
        self._member = Worker()
        for group in self._joined.values():
            ray_groups.leave(group.name)
        self._joined = {}
        gc.collect()  # its shared memory


def _call_of(name: str) -> Callable[..., Any]:
    def call(self: _Hosted, *args: Any) -> Any:
        return getattr(self._member, name)(*args)

    return call


_NAMES = {name for kind in (Worker, Server) for name, _ in inspect.getmembers(kind, inspect.isfunction)}
_CALLS = {name: _call_of(name) for name in sorted(_NAMES) if not name.startswith("_")}
Hosted: type[_Hosted] = type("Hosted", (_Hosted,), _CALLS | {"__module__": __name__})
