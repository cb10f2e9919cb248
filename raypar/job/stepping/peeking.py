"""Inspection of the actors within a step by hand: the results of actions, predicates on them, and memory held."""

from __future__ import annotations

import dis
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from raypar.actors.mesh.mesh import Axis
from raypar.job.start.loaded_run import LoadedRun
from raypar.job.stepping.views import State
from raypar.schedules.action import MOVES, Action, Op
from raypar.schedules.nearest_name import did_you_mean
from raypar.schedules.rules import rank_of
from raypar.schedules.schedule import Schedule
from raypar.schedules.step_board import MoveError, makes_tensors

if TYPE_CHECKING:
    from raypar.actors.inspect.step import ActorContents, ComputedValue

_GRADIENT, _WEIGHT = "job.grad(name) has the gradient of a weight", "job.param(name) has a weight"
_EFFECTS = {  # the effect of an action that has no tensors to show
    **dict.fromkeys((Op.B, Op.I), f"hands no gradient on, stage 0 has none before it: {_GRADIENT}"),
    Op.W: f"makes gradients of weights only: {_GRADIENT}",
    Op.REDUCE_GRAD: f"sums gradients over the replicas, and makes nothing else: {_GRADIENT}",
    Op.UNSHARD: f"gathers the weights of its stage, and makes nothing else: {_WEIGHT}",
    Op.RESHARD: f"frees the weights that were gathered, and makes nothing: {_WEIGHT}",
    **dict.fromkeys(MOVES, "moves what its stage keeps to host memory or back, and makes nothing"),
    Op.STEP: f"updates weights, and makes nothing else: {_WEIGHT}",
}


class Peeking:
    """Queries the actors for results and memory.

    Args:
        loaded: The run.
        guard: Makes a call to the actors, and handles its failure as the job does.
    """

    def __init__(self, loaded: LoadedRun, guard: Callable[[Callable[[], Any]], Any]) -> None:
        self._loaded, self._guard = loaded, guard

    def at(self, action: Action, schedule: Schedule, *, dp: int, cp: int, tp: int) -> ComputedValue:
        """Return the result of an action that is done on one actor, with the tensors.

        Args:
            action: The action.
            schedule: The schedule that has it.
            dp: The replica.
            cp: The coordinate on the context-parallel axis.
            tp: The coordinate on the tensor-parallel axis.

        Raises:
            MoveError: There is no such coordinate.
        """
        mesh = self._loaded.world.mesh
        coordinate: dict[Axis, int] = {"dp": dp, "cp": cp, "tp": tp}
        for axis, index in coordinate.items():
            if not 0 <= index < mesh.ways(axis):
                raise MoveError(f"there is no {axis}={index}: the mesh has {mesh.ways(axis)}, counted from 0")
        rank = self._loaded.world.worker(rank_of(action, schedule), **coordinate)
        return self._seen(action, [rank], tensors=True)[0]

    def everywhere(self, action: Action, schedule: Schedule) -> list[ComputedValue]:
        """Return the results of an action that is done on all workers that perform it, without the tensors."""
        ranks = self._loaded.world.trainers_in(rank_of(action, schedule))
        return self._seen(action, [rank for rank in ranks if rank < self._loaded.world.mesh.size], tensors=False)

    def state(self, done: Sequence[Action]) -> State:
        """Return the memory that every actor holds after the actions that are done."""
        found: list[ActorContents] = self._guard(
            lambda: self._loaded.calls.all("probe", "held", what="looking at the actors")
        )
        whole = {action._replace(op=Op.I): action for action in done if action.op is Op.B}
        return State(
            replace(held, values={whole.get(value, value): size for value, size in held.values.items()})
            for held in found
        )

    def _seen(self, action: Action, ranks: Sequence[int], *, tensors: bool) -> list[ComputedValue]:
        what = f"peeking at {action}"
        return list(self._guard(lambda: self._loaded.calls.some(ranks, "probe", "peek", action, tensors, what=what)))


def demand_tensors(action: Action, done: Sequence[Action]) -> None:
    """Raise MoveError if an action makes no tensors; the message names an action that is done and makes some."""
    if not makes_tensors(action):
        other = next((f', or peek("{name}")' for name in reversed(done) if makes_tensors(name)), "")
        raise MoveError(f"{action} {_EFFECTS[action.op]}{other}")


def predicate_faults(predicate: Callable[[ComputedValue], object]) -> list[str]:
    """Return a fault for each attribute that a Python function uses of its argument and that a result does not have.

    Args:
        predicate: The function. It is not called. A function that is not written in Python has no faults.

    Returns:
        A sentence for each name, with the nearest known one.
    """
    from raypar.actors.inspect.step import ComputedValue  # imports torch

    code = getattr(predicate, "__code__", None)
    if code is None or not code.co_argcount:
        return []
    argument = code.co_varnames[code.co_argcount - 1 if code.co_varnames[0] == "self" else 0]
    names = {*dir(ComputedValue), *(one.name for one in fields(ComputedValue))}
    known = sorted(name for name in names if not name.startswith("_"))
    used, before = dict[str, None](), None
    for one in dis.get_instructions(code):
        if one.opname.startswith("STORE_FAST") and one.argval == argument:
            return []  # the argument is assigned, so it may be another object
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD") and before == argument and not one.argval.startswith("_"):
            used[one.argval] = None
        before = one.argval if one.opname.startswith("LOAD_FAST") else None
    guesses = {name: did_you_mean(name, known, f"it has {', '.join(known)}") for name in used if name not in known}
    return [f"break_on: what was seen has no {name!r}: {guess}" for name, guess in guesses.items()]
