"""The 1F1B schedule (one forward, one backward) of PipeDream-Flush, also with replicas (1F1B-RR)."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.schedules.action import Action, Op
from raypar.schedules.generators.entry import Sizes
from raypar.schedules.schedule import Schedule, ScheduleError

SIZES = Sizes()


def one_f_one_b(num_ranks: int, num_microbatches: int, *, replicas: Sequence[int] = ()) -> Schedule:
    """Warm up with forwards, alternate one forward and one backward, then drain the remaining backwards.

    Makespan and bubble are those of GPipe: (m + p - 1)(tF + tB) and (p - 1) / (m + p - 1). Only memory shrinks: rank s
    holds the activations of min(p - s, m) microbatches, however large m is.

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step.
        replicas: The number of replicas r of each rank, which take microbatches in turn (1F1B-RR). A replica holds the
            activations of ceil(n / r) of them, with n replicas on its rank and all later ones. Empty: one each.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size is not accepted.

    Source: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 2.2; Narayanan et al.
    2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.1. With
    replicas: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", section 3.2.

    With 4 ranks, 8 microbatches::

        rank 0  F0 F1 F2 F3          B0 F4 B1 F5 B2 F6 B3 F7 B4    B5    B6    B7
        rank 1     F0 F1 F2       B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5    B6    B7
        rank 2        F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6    B7
        rank 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
        1f1b in slots: makespan 22, bubble 27.3%, in flight 4 3 2 1
    """
    SIZES.demand("1f1b", num_ranks, num_microbatches)
    counts = tuple(replicas) or (1,) * num_ranks
    if len(counts) != num_ranks or min(counts) < 1:
        raise ScheduleError(f"schedule '1f1b': replicas={counts}: give a number for each of {num_ranks} ranks")
    numbers = list(range(num_microbatches))  # all rows share these objects: millions of them take memory
    rows = (
        _row(rank, numbers[replica::count], (sum(counts[rank:]) - 1) // count)
        for rank, count in enumerate(counts)
        for replica in range(count)
    )
    frozen = tuple(map(tuple, rows))
    several = counts if max(counts) > 1 else ()
    return Schedule("1f1b", frozen, tuple(range(num_ranks)), num_microbatches, False, False, replicas=several)


def _row(stage: int, microbatches: Sequence[int], ahead: int) -> list[Action]:
    """Return the row of a replica.

    Args:
        stage: Its stage.
        microbatches: Its microbatches.
        ahead: Number of forwards before the first backward, without the one of that microbatch.
    """
    forwards = [Action(stage, Op.F, mb) for mb in microbatches]
    backwards = [Action(stage, Op.B, mb) for mb in microbatches]
    warmup = min(ahead, len(microbatches))
    # 1. Warm-up: one forward for each later rank, so that the first backward arrives when this rank is free.
    row = forwards[:warmup]
    # 2. Steady state: one forward, one backward, in turn.
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += (forward, backward)
    # 3. Drain: the remaining backwards.
    return row + backwards[len(microbatches) - warmup :]
