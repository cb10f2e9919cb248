"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from raypar.schedules.action import Action, Op
from raypar.schedules.generators.entry import Sizes
from raypar.schedules.schedule import Schedule

SIZES = Sizes()


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards in the same order of microbatches (Huang et al. 2019, section 2.3).

    The makespan is (m + p - 1)(tF + tB), the bubble (p - 1) / (m + p - 1). Every rank holds the activations of all
    m microbatches at once.

    With 4 ranks, 8 microbatches::

        rank 0  F0 F1 F2 F3 F4 F5 F6 F7                   B0 B1 B2 B3 B4 B5 B6 B7
        rank 1     F0 F1 F2 F3 F4 F5 F6 F7             B0 B1 B2 B3 B4 B5 B6 B7
        rank 2        F0 F1 F2 F3 F4 F5 F6 F7       B0 B1 B2 B3 B4 B5 B6 B7
        rank 3           F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
        gpipe: makespan 22, bubble 27.3%, in flight 8 8 8 8
    """
    SIZES.demand("gpipe", num_ranks, num_microbatches)
    return Schedule.of(
        "gpipe",
        ([Action(rank, op, mb) for op in (Op.F, Op.B) for mb in range(num_microbatches)] for rank in range(num_ranks)),
    )
