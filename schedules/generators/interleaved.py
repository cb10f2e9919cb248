"""The interleaved 1F1B schedule: several stages on each rank, which gives a smaller bubble for more communication."""

from __future__ import annotations

from raypar.schedules.action import Action, Op
from raypar.schedules.generators.entry import Sizes
from raypar.schedules.schedule import Schedule

SIZES = Sizes(min_chunks=2, max_chunks=None, whole_rounds=True, hint="set chunks to 2 or more, or use '1f1b'")


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Run 1F1B with v stages (chunks) on each rank; rank s holds the stages ``chunk * p + s``.

    Microbatches are taken in rounds of p: a round passes chunk 0 of all ranks, then chunk 1, and so on. With times tF
    and tB of one forward and one backward of one chunk, the makespan is (m v + p - 1)(tF + tB): the bubble of 1F1B,
    divided by v. Rank s holds the activations of min(2(p - s - 1) + (v - 1)p + 1, m v) chunks.

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step, a multiple of p.
        num_chunks: Number of stages v on each rank, at least 2.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size is not accepted.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    section 2.2.2.

    With 2 ranks, 4 microbatches, 2 chunks::

        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
        rank 1      1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
        interleaved in slots: makespan 18, bubble 11.1%, in flight 5 3
    """
    SIZES.demand("interleaved", num_ranks, num_microbatches, num_chunks)
    return Schedule.of(
        "interleaved", (_row(rank, num_ranks, num_microbatches, num_chunks) for rank in range(num_ranks))
    )


def _row(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    stages = range(rank, num_ranks * num_chunks, num_ranks)
    rounds = range(0, num_microbatches, num_ranks)
    forwards = [Action(s, Op.F, first + i) for first in rounds for s in stages for i in range(num_ranks)]
    backwards = [Action(s, Op.B, first + i) for first in rounds for s in reversed(stages) for i in range(num_ranks)]
    warmup = min(2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks, len(forwards))
    # 1. Warm-up: forwards until the first microbatch has come back from the last stage.
    row = forwards[:warmup]
    # 2. Steady state: one forward, one backward, in turn.
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += (forward, backward)
    # 3. Drain: the backwards of the forwards that the warm-up ran ahead.
    return row + backwards[len(forwards) - warmup :]
