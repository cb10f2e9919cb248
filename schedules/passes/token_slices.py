"""Token slices: each microbatch of a causal model is cut along its sequence, and its slices follow one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raypar.schedules.action import BACKWARDS, Action, Op
from raypar.schedules.rules import needs, provides
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.simulation.sweep import Sweep


def with_slices(schedule: Schedule, slices: int) -> Schedule:
    """Let numbers in a schedule mean slices: number n is slice n mod ``slices`` of microbatch n // ``slices``.

    A slice's forward attends to the slices before it, so that forwards of a microbatch keep their order. Its backwards
    come in the reverse order, because the keys and values of a slice have gradients from all slices after it. So this
    reverses the backwards of a microbatch's slices, in all rows alike. Then each rank performs as many more forwards
    before its first backward as are needed for the last slice: ``slices`` - 1 for 1F1B. Rows that already have such an
    order stay as they are.

    Args:
        schedule: A synchronous schedule of compute actions, for ``slices`` times as many microbatches.
        slices: Number of slices of a microbatch.

    Returns:
        The schedule; the same one for one slice.

    Raises:
        ScheduleError: The schedule has another kind, or its number of forwards is no multiple of ``slices``.

    Source: Sun et al. 2024, "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training".
    """
    if slices == 1 or schedule.slices == slices:
        return schedule
    if schedule.slices > 1:
        raise ScheduleError(
            f"schedule {schedule.name!r} has microbatches of {schedule.slices} slices already: take {schedule.slices}"
        )
    if schedule.stream or schedule.replicas or schedule.lowered:
        raise ScheduleError(
            f"schedule {schedule.name!r} is not the compute actions of one synchronous step, one row a rank, whose "
            f"microbatches can be cut into {slices} slices: leave slices (token_slices) out"
        )
    if slices < 1 or schedule.num_microbatches % slices:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.num_microbatches} forwards of a stage, which are not "
            f"microbatches of {slices} slices: give it a multiple of {slices}"
        )
    sliced = replace(schedule, slices=slices)
    if _performs(sliced):
        return sliced
    turned = [[_turned(action, slices) for action in row] for row in schedule.rows]
    for more in range(schedule.num_microbatches * schedule.num_stages + 1):
        tried = replace(sliced, rows=tuple(tuple(_later(row, more)) for row in turned))
        if _performs(tried):
            return tried
    raise ScheduleError(
        f"schedule {schedule.name!r} can't be performed in slices: let each stage "
        "perform microbatches in their order, forwards and backwards, or write the order of slices yourself"
    )


def _turned(action: Action, slices: int) -> Action:
    """Return a backward with its slice counted from the end of the microbatch; other actions as they are."""
    number = action.microbatch
    if number is None or action.op not in BACKWARDS:
        return action
    return action._replace(microbatch=number + slices - 1 - 2 * (number % slices))


def _later(row: Sequence[Action], more: int) -> list[Action]:
    """Return a row in which each backward comes after ``more`` further forwards, or after all."""
    forwards = [action for action in row if action.op is Op.F]
    made, given, before = list[Action](), 0, 0
    for action in row:
        if action.op is Op.F:
            before += 1
            continue
        wanted = min(before + more, len(forwards))
        made += forwards[given:wanted]
        given = max(given, wanted)
        made.append(action)
    return made + forwards[given:]


def _performs(schedule: Schedule) -> bool:
    """Return whether the rows can be performed in their order, with every need done before its action."""
    sweep, done = Sweep(schedule), set[Action]()
    for _, _, action in sweep:
        if any(need not in done for need in needs(action, schedule)):
            return False
        done.update(provides(action))
    return not sweep.waits()
