"""Looks at the actors within a step by hand: what its actions have made, and what every actor holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raypar.actors.mesh.mesh import Axis
from raypar.actors.mesh.world import World
from raypar.cluster.calls import Calls
from raypar.schedules.action import MOVES, Action, Op
from raypar.schedules.rules import rank_of
from raypar.schedules.schedule import Schedule
from raypar.schedules.step_board import MoveError, makes_tensors
from raypar.stepping.views import State

if TYPE_CHECKING:
    from raypar.actors.inspect.step import ActorContents, ComputedValue

_GRADIENT, _WEIGHT = "job.grad(name) has the gradient of a weight", "job.param(name) has a weight"
_MAKES = {  # what an action makes that has no tensors to show
    **dict.fromkeys((Op.B, Op.I), f"hands no gradient on, stage 0 has none before it: {_GRADIENT}"),
    Op.W: f"makes gradients of weights only: {_GRADIENT}",
    Op.REDUCE_GRAD: f"sums gradients over the replicas, and makes nothing else: {_GRADIENT}",
    Op.UNSHARD: f"gathers the weights of its stage, and makes nothing else: {_WEIGHT}",
    Op.RESHARD: f"frees the weights that were gathered, and makes nothing: {_WEIGHT}",
    **dict.fromkeys(MOVES, "moves what its stage keeps to host memory or back, and makes nothing"),
    Op.STEP: f"updates weights, and makes nothing else: {_WEIGHT}",
}


class Peeking:
    """Looks at the actors.

    Args:
        world: The ranks.
        calls: Calls to the actors.
        guard: Makes a call to the actors, and handles its failure as the job does.
    """

    def __init__(self, world: World, calls: Calls, guard: Callable[[Callable[[], Any]], Any]) -> None:
        self._world, self._calls, self._guard = world, calls, guard

    def at(self, action: Action, schedule: Schedule, *, dp: int, cp: int, tp: int) -> ComputedValue:
        """Return what an action that is done has made on one actor, with the tensors.

        Args:
            action: The action.
            schedule: The schedule that has it.
            dp: The replica.
            cp: The coordinate on the context-parallel axis.
            tp: The coordinate on the tensor-parallel axis.

        Raises:
            MoveError: There is no such coordinate.
        """
        mesh = self._world.mesh
        places: dict[Axis, int] = {"dp": dp, "cp": cp, "tp": tp}
        for axis, place in places.items():
            if not 0 <= place < mesh.ways(axis):
                raise MoveError(f"there is no {axis}={place}: the mesh has {mesh.ways(axis)}, counted from 0")
        return self._seen(action, [self._world.worker(rank_of(action, schedule), **places)], tensors=True)[0]

    def everywhere(self, action: Action, schedule: Schedule) -> list[ComputedValue]:
        """Return what an action that is done has made on all workers that perform it, without the tensors."""
        ranks = self._world.trainers_in(rank_of(action, schedule))
        return self._seen(action, [rank for rank in ranks if rank < self._world.mesh.size], tensors=False)

    def state(self, done: Sequence[Action]) -> State:
        """Return what every actor holds, after the actions that are done."""
        found: list[ActorContents] = self._guard(lambda: self._calls.all("probe", "held", what="looking at the actors"))
        whole = {action._replace(op=Op.I): action for action in done if action.op is Op.B}
        return State(
            replace(held, values={whole.get(value, value): size for value, size in held.values.items()})
            for held in found
        )

    def _seen(self, action: Action, ranks: Sequence[int], *, tensors: bool) -> list[ComputedValue]:
        what = f"peeking at {action}"
        return list(self._guard(lambda: self._calls.some(ranks, "probe", "peek", action, tensors, what=what)))


def demand_tensors(action: Action, done: Sequence[Action]) -> None:
    """Raise MoveError if an action makes no tensors, with one of those that are done and do."""
    if not makes_tensors(action):
        other = next((f', or peek("{name}")' for name in reversed(done) if makes_tensors(name)), "")
        raise MoveError(f"{action} {_MAKES[action.op]}{other}")
