"""Counts of the ops that torch dispatches: on a GPU most are launches of a kernel by the host."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from raypar.actors.autograd.torch_private import DispatchMode
from tests.support.team import Team

_NO_KERNELS = ("aten._unsafe_view", "aten.lift_fresh", "aten.empty", "aten.new_empty", "profiler.")  # beside views


class Ops(NamedTuple):
    """How often each op was dispatched.

    Attributes:
        kernels: Ops that compute or copy.
        views: Views, new memory and marks of the profiler: these start nothing on a GPU.
    """

    kernels: Counter[str]
    views: Counter[str]

    def __sub__(self, fewer: Ops) -> Ops:
        return Ops(self.kernels - fewer.kernels, self.views - fewer.views)


class DispatchedOps(DispatchMode):
    """Counts the ops that its thread dispatches while it is active."""

    only_looks = True

    def __init__(self) -> None:
        super().__init__()
        self.ops = Ops(Counter(), Counter())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        counted = self.ops.views if func.is_view or name.startswith(_NO_KERNELS) else self.ops.kernels
        counted[name] += 1
        return func(*args, **kwargs or {})


def ops_of_a_step(team: Team, number: int = 1) -> dict[str, Ops]:
    """Return the ops of each action in a step of the first actor of a team; ``begin`` and ``end`` enclose them."""
    rows = team.programs["train"].rows

    def step(actor: Any) -> dict[str, Ops]:
        row = rows[team.world.row(team.all.index(actor))]
        calls = [("begin", lambda: actor.start_step(number, 0))]
        calls += [(str(action), lambda action=action: actor.act(action)) for action in row]
        found: dict[str, Ops] = {}
        for name, call in (*calls, ("end", lambda: actor.end_step(number))):
            with DispatchedOps() as mode:
                call()
            found[name] = mode.ops
        return found

    found = team.each(step)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found[0]
