"""Schedules with several stages on each rank, assigned in turn: rank s holds the stages ``chunk * p + s``.

Interleaved 1F1B goes depth first: a round of about p microbatches passes all chunks before the next one starts. The
looped schedule goes breadth first: all microbatches pass a chunk before the next chunk. The zero-bubble one splits its
backwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, pairwise, repeat, zip_longest

from raypar.schedules.action import Action, Op
from raypar.schedules.generators.entry import Sizes
from raypar.schedules.schedule import Schedule

SIZES = Sizes(min_chunks=2, max_chunks=None, hint="set chunks to 2 or more, or use '1f1b'")


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Run 1F1B with v stages (chunks) on each rank: the bubble of 1F1B, divided by v.

    Microbatches are grouped in rounds: a round passes chunk 0 of all ranks, then chunk 1, and so on. Rounds have p
    microbatches, or if m is no multiple of p, some more: with p = 4 and m = 11 they have 6 and 5. With times tF and tB
    of one forward and one backward of one chunk, and m at least p, the makespan is (m v + p - 1)(tF + tB). With fewer
    microbatches than ranks it is (m + v p - 1)(tF + tB). Rank s holds the activations of min(2(p - s - 1) + (v - 1)g +
    1, m v) chunks, g being the microbatches of the first round.

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step.
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
    rounds = _rounds(num_ranks, num_microbatches)

    def row(rank: int) -> list[Action]:
        """Run forwards until the first microbatch has come back, one forward and one backward in turn, and the rest."""
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        ahead = 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * len(rounds[0])
        forwards, backwards = _depth_first(stages, Op.F, rounds), _depth_first(stages[::-1], Op.B, rounds)
        return forwards[:ahead] + _in_turn(forwards[ahead:], backwards)

    return Schedule.of("interleaved", map(row, range(num_ranks)))


def zb_interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Run interleaved 1F1B with every backward split, each W later the later the rank: ZB-H1 with v stages a rank.

    With tF = tI = tW and m at least p the makespan is (3 m v + p - 1) tF. Every rank holds the activations of min((v -
    1)g + p, m v) chunks, g being the microbatches of the first round (p if m is a multiple of p; see ``interleaved``).

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step.
        num_chunks: Number of stages v on each rank, at least 2.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size is not accepted.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1, on the stages of Narayanan et al. 2021.

    With 2 ranks, 2 microbatches, 2 chunks::

        rank 0  0F0 0F1 2F0 2F1     2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        rank 1      1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
        zb-interleaved in slots: makespan 13, bubble 7.7%, in flight 4 4
    """
    SIZES.demand("zb-interleaved", num_ranks, num_microbatches, num_chunks)
    rounds = _rounds(num_ranks, num_microbatches)

    def row(rank: int) -> list[Action]:
        """Run forwards until the first microbatch has come back, then F, I and W in turn; W is ``rank`` after I."""
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        ahead = num_ranks - 1 - rank + (num_chunks - 1) * len(rounds[0])
        forwards, inputs, weights = (
            _depth_first(stages if op is Op.F else stages[::-1], op, rounds) for op in (Op.F, Op.I, Op.W)
        )
        return forwards[:ahead] + _in_turn(forwards[ahead:], inputs, chain(repeat(None, rank), weights))

    return Schedule.of("zb-interleaved", map(row, range(num_ranks)))


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Run GPipe with v stages (chunks) on each rank, breadth first: all microbatches pass a chunk, then the next one.

    With times tF and tB of one forward and one backward of one chunk, and m at least p, the makespan is (m v + p - 1)
    (tF + tB), as with ``interleaved``. Every rank holds the activations of m v chunks. A step uses the weights of a
    stage in two intervals only, so that sharded weights are gathered twice; gradients of the last stages are ready
    early.

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step.
        num_chunks: Number of stages v on each rank, at least 2.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size is not accepted.

    Source: Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism", section 4.

    With 2 ranks, 3 microbatches, 2 chunks::

        rank 0  0F0 0F1 0F2 2F0 2F1 2F2         2B0 2B1 2B2 0B0 0B1 0B2
        rank 1      1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2
        looped-bfs in slots: makespan 14, bubble 14.3%, in flight 6 6
    """
    SIZES.demand("looped-bfs", num_ranks, num_microbatches, num_chunks)
    everything = [range(num_microbatches)]

    def row(rank: int) -> list[Action]:
        """Run the chunks in order, and then their backwards from the last chunk on."""
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        return _depth_first(stages, Op.F, everything) + _depth_first(stages[::-1], Op.B, everything)

    return Schedule.of("looped-bfs", map(row, range(num_ranks)))


def _rounds(num_ranks: int, num_microbatches: int) -> list[range]:
    """Divide microbatches into rounds of one or more a rank; the first rounds take one more of the remainder each."""
    number = max(1, num_microbatches // num_ranks)
    size, left = divmod(num_microbatches, number)
    starts = [one * size + min(one, left) for one in range(number + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _depth_first(stages: range, op: Op, rounds: list[range]) -> list[Action]:
    """Pass a round through all stages, and then the next round."""
    return [Action(stage, op, microbatch) for taken in rounds for stage in stages for microbatch in taken]


def _in_turn(*queues: Iterable[Action | None]) -> list[Action]:
    """Take one action of each queue in turn, as long as it has any; None is no action."""
    return [action for turn in zip_longest(*queues) for action in turn if action is not None]
