"""The 1F1B schedule (one forward, one backward) of PipeDream-Flush."""

from __future__ import annotations

from raypar.schedules.action import Action, Op
from raypar.schedules.generators.entry import Sizes
from raypar.schedules.schedule import Schedule

SIZES = Sizes()


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Warm up with forwards, alternate one forward and one backward, then drain the remaining backwards.

    Makespan and bubble are those of GPipe: (m + p - 1)(tF + tB) and (p - 1) / (m + p - 1). Only memory shrinks: rank s
    holds the activations of min(p - s, m) microbatches, however large m is.

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size is not accepted.

    Source: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 2.2; Narayanan et al.
    2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.1.

    With 4 ranks, 8 microbatches::

        rank 0  F0 F1 F2 F3          B0 F4 B1 F5 B2 F6 B3 F7 B4    B5    B6    B7
        rank 1     F0 F1 F2       B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5    B6    B7
        rank 2        F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6    B7
        rank 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
        1f1b in slots: makespan 22, bubble 27.3%, in flight 4 3 2 1
    """
    SIZES.demand("1f1b", num_ranks, num_microbatches)
    return Schedule.of("1f1b", (_row(rank, num_ranks, num_microbatches) for rank in range(num_ranks)))


def _row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    forwards = [Action(rank, Op.F, mb) for mb in range(num_microbatches)]
    backwards = [Action(rank, Op.B, mb) for mb in range(num_microbatches)]
    warmup = min(num_ranks - 1 - rank, num_microbatches)
    # 1. Warm-up: one forward for each rank behind this one, so that the first backward arrives when this rank is free.
    row = forwards[:warmup]
    # 2. Steady state: one forward, one backward, in turn.
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += (forward, backward)
    # 3. Drain: the backwards of the forwards that the warm-up ran ahead.
    return row + backwards[num_microbatches - warmup :]
