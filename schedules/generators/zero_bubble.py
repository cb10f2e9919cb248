"""Zero-bubble schedules with one stage a rank: ZB-H1 and ZB-H2, whose weight gradients fill the waits of 1F1B."""

from __future__ import annotations

from raypar.schedules.action import Action, Op
from raypar.schedules.generators.entry import Sizes
from raypar.schedules.schedule import Schedule

SIZES = Sizes()


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Run 1F1B with every backward split, each W later the later the rank: the memory of 1F1B, a third of its bubble.

    Rank s holds the activations of p microbatches, as rank 0 of 1F1B does. With tF = tI = tW the bubble is (p - 1) tF,
    where 1F1B has (p - 1)(tF + tI + tW).

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size is not accepted.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1.

    With 4 ranks, 6 microbatches::

        rank 0  F0 F1 F2 F3          I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        rank 1     F0 F1 F2       I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        rank 2        F0 F1    I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        rank 3           F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
        zb-h1 in slots: makespan 21, bubble 14.3%, in flight 4 4 4 4
    """
    SIZES.demand("zb-h1", num_ranks, num_microbatches)
    rows = (_row(rank, num_ranks - rank, rank, num_microbatches) for rank in range(num_ranks))
    return Schedule.of("zb-h1", rows)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Run ZB-H1 with more forwards before the first backward: twice the memory of 1F1B, and next to no bubble.

    Rank s holds the activations of 2p - 1 microbatches. With tF = tI = tW and m at least 2p - 1 no rank waits between
    its first action and its last.

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size is not accepted.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.2.

    With 3 ranks, 6 microbatches::

        rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
        rank 1     F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
        rank 2        F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
        zb-h2 in slots: makespan 20, bubble 10.0%, in flight 5 5 5
    """
    SIZES.demand("zb-h2", num_ranks, num_microbatches)
    rows = (_row(rank, 2 * (num_ranks - rank) - 1, 2 * rank, num_microbatches) for rank in range(num_ranks))
    return Schedule.of("zb-h2", rows)


def _row(rank: int, ahead: int, late: int, num_microbatches: int) -> list[Action]:
    """Return the row of a rank.

    Args:
        rank: The rank, which holds the stage of its number.
        ahead: Number of forwards before the first backward, if there are as many.
        late: Number of microbatches by which W is later than I.
        num_microbatches: Number of microbatches in a step.
    """
    forwards, inputs, weights = (
        [Action(rank, op, microbatch) for microbatch in range(num_microbatches)] for op in (Op.F, Op.I, Op.W)
    )
    row = forwards[:ahead]
    for microbatch in range(num_microbatches):
        row.append(inputs[microbatch])
        if microbatch >= late:
            row.append(weights[microbatch - late])
        row += forwards[ahead + microbatch : ahead + microbatch + 1]
    return row + weights[max(0, num_microbatches - late) :]
