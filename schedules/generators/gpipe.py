"""The GPipe schedule: all forwards, then all backwards."""

from __future__ import annotations

from raypar.schedules.action import Action, Op
from raypar.schedules.generators.entry import Sizes
from raypar.schedules.schedule import Schedule

SIZES = Sizes()


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Run all forwards, then all backwards in the same order of microbatches.

    With times tF and tB of one forward and one backward, the makespan is (m + p - 1)(tF + tB) and the bubble is (p - 1)
    / (m + p - 1). Every rank holds the activations of all m microbatches at once.

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size is not accepted.

    Source: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", section
    2.3.

    With 4 ranks, 8 microbatches::

        rank 0  F0 F1 F2 F3 F4 F5 F6 F7                   B0 B1 B2 B3 B4 B5 B6 B7
        rank 1     F0 F1 F2 F3 F4 F5 F6 F7             B0 B1 B2 B3 B4 B5 B6 B7
        rank 2        F0 F1 F2 F3 F4 F5 F6 F7       B0 B1 B2 B3 B4 B5 B6 B7
        rank 3           F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
        gpipe in slots: makespan 22, bubble 27.3%, in flight 8 8 8 8
    """
    SIZES.demand("gpipe", num_ranks, num_microbatches)
    return Schedule.of(
        "gpipe",
        ([Action(rank, op, mb) for op in (Op.F, Op.B) for mb in range(num_microbatches)] for rank in range(num_ranks)),
    )
