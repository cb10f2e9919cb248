"""1F1B: the synchronous one-forward-one-backward schedule of PipeDream-Flush."""

from __future__ import annotations

from raypar.schedules.action import Action, Op
from raypar.schedules.generators.entry import Sizes
from raypar.schedules.schedule import Schedule

SIZES = Sizes()


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Warm up, alternate one forward and one backward, drain (Narayanan et al. 2021, "Memory-Efficient
    Pipeline-Parallel DNN Training", section 2.2; Megatron-2, section 2.2.1).

    Makespan and bubble are those of GPipe, (m + p - 1)(tF + tB); what shrinks is memory: rank s holds the
    activations of min(p - s, m) microbatches, however many there are.

    With 4 ranks, 8 microbatches::

        rank 0  F0 F1 F2 F3          B0 F4 B1 F5 B2 F6 B3 F7 B4    B5    B6    B7
        rank 1     F0 F1 F2       B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5    B6    B7
        rank 2        F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6    B7
        rank 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
        1f1b: makespan 22, bubble 27.3%, in flight 4 3 2 1
    """
    SIZES.demand("1f1b", num_ranks, num_microbatches)
    return Schedule.of("1f1b", (_row(rank, num_ranks, num_microbatches) for rank in range(num_ranks)))


def _row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    forwards = [Action(rank, Op.F, mb) for mb in range(num_microbatches)]
    backwards = [Action(rank, Op.B, mb) for mb in range(num_microbatches)]
    warmup = min(num_ranks - 1 - rank, num_microbatches)
    # 1. One forward for each rank further down, so that the first backward meets a rank that is free.
    row = forwards[:warmup]
    # 2. The steady state: one forward, one backward.
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += (forward, backward)
    # 3. Drain what the warm-up put in.
    return row + backwards[num_microbatches - warmup :]
