"""The rules of pipeline ranks with several replicas: equal shares of a step, and collectives in one order."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm

from raypar.schedules.action import WHOLE_STAGE, Action, Op
from raypar.schedules.checking.errors import Fault
from raypar.schedules.schedule import Schedule

_RULE = "replicas"


def replica_faults(schedule: Schedule) -> Iterator[Fault]:
    """Yield where the replicas of a pipeline rank have unequal shares, or meet in different orders.

    They sum gradients together, so that each must come to the same reductions and updates in the same order.

    Args:
        schedule: The schedule.
    """
    length = schedule.microbatches_a_step
    for rank, count in enumerate(schedule.replicas):
        first, *others = schedule.rows_of(rank)
        if length % count:
            fewer = gcd(length, count)
            sentence = (
                f"{count} replicas of rank {rank} do not divide the {length} microbatches of a step: take a multiple "
                f"of {lcm(*schedule.replicas)} microbatches, or {fewer} replica{'s' * (fewer > 1)}"
            )
            yield Fault(first, None, _RULE, sentence)
            continue
        wanted = _together(schedule, first)
        for row in others:
            for (_, before), (index, action) in zip(wanted, found := _together(schedule, row), strict=False):
                if before != action:
                    sentence = f"{action}, where {schedule.label(first)} has {before}: replicas meet in one order"
                    yield Fault(row, index, _RULE, sentence)
                    break
            else:
                if len(wanted) != len(found):
                    sentence = f"{len(found)} reductions and updates, {schedule.label(first)} has {len(wanted)}"
                    yield Fault(row, None, _RULE, f"{sentence}: replicas make all of them together")


def _together(schedule: Schedule, row: int) -> list[tuple[int, Action]]:
    """Return the actions of a row that all replicas perform together, each with its place."""
    ops = WHOLE_STAGE | {Op.STEP}
    return [(index, action) for index, action in enumerate(schedule.rows[row]) if action.op in ops]
