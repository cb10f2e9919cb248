"""The schedule without pipelining, the reference that the other schedules are compared with."""

from __future__ import annotations

from raypar.schedules.action import Action, Op
from raypar.schedules.generators.entry import Sizes
from raypar.schedules.schedule import Schedule

SIZES = Sizes()


def naive(num_ranks: int, num_microbatches: int) -> Schedule:
    """Run each microbatch forward and backward through all stages before the next one starts.

    Only one rank works at a time. With times tF and tB of one forward and one backward, the makespan is m p (tF + tB)
    and the bubble is 1 - 1/p. A rank never holds more than one activation.

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size is not accepted.

    With 4 ranks, 2 microbatches::

        rank 0  F0                   B0 F1                   B1
        rank 1     F0             B0       F1             B1
        rank 2        F0       B0             F1       B1
        rank 3           F0 B0                   F1 B1
        naive in slots: makespan 16, bubble 75.0%, in flight 1 1 1 1
    """
    SIZES.demand("naive", num_ranks, num_microbatches)
    return Schedule.of(
        "naive",
        ([Action(rank, op, mb) for mb in range(num_microbatches) for op in (Op.F, Op.B)] for rank in range(num_ranks)),
    )
