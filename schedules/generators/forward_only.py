"""The forward-only schedule: evaluation and inference on the stages of a training run."""

from __future__ import annotations

from raypar.schedules.action import Action, Op
from raypar.schedules.generators.entry import Sizes
from raypar.schedules.schedule import Schedule

SIZES = Sizes(max_chunks=None, hint="set chunks to 1 or more")


def forward(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Run every forward and no backward, in rounds of p microbatches; rank r holds the stages ``chunk * p + r``.

    Any number of microbatches is accepted: the last round may be short. No activation is saved for a backward, so a
    rank holds only the current one.

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches in a step.
        num_chunks: Number of stages on each rank.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size is not accepted.

    With 4 ranks, 8 microbatches::

        rank 0  F0 F1 F2 F3 F4 F5 F6 F7
        rank 1     F0 F1 F2 F3 F4 F5 F6 F7
        rank 2        F0 F1 F2 F3 F4 F5 F6 F7
        rank 3           F0 F1 F2 F3 F4 F5 F6 F7
        forward in slots: makespan 11, bubble 27.3%, in flight 0 0 0 0
    """
    SIZES.demand("forward", num_ranks, num_microbatches, num_chunks)
    return Schedule.of("forward", (_row(rank, num_ranks, num_microbatches, num_chunks) for rank in range(num_ranks)))


def _row(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    return [
        Action(stage, Op.F, mb)
        for first in range(0, num_microbatches, num_ranks)
        for stage in range(rank, num_ranks * num_chunks, num_ranks)
        for mb in range(first, min(first + num_ranks, num_microbatches))
    ]
