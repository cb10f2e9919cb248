"""DualPipe and DualPipeV: schedules that pair every forward of a microbatch with a backward of another one."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.schedules.action import Action, Op
from raypar.schedules.generators.entry import Sizes
from raypar.schedules.generators.v_steps import VSteps
from raypar.schedules.schedule import Schedule, ScheduleError

TWICE = Sizes(min_chunks=2, max_chunks=2, multiple=2, hint="each actor has two stages, leave chunks out")
SIZES = Sizes(min_chunks=2, max_chunks=2, hint="a V has two stages a rank, leave chunks out, or set it to 2")


def dualpipe_v(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Run DualPipeV: in the steady state every F of a stage is paired with a B of the rank's other stage.

    The input of B travels while F computes, and the output of F travels while B computes: a RECV is posted before the
    rank waits for it, and a SEND does not wait. If such a pair is one action of length F&B, whose values are sent at
    its end, and tF = tI = tW, the bubble is (p - 1)(F&B + B - 3W), that of DualPipe over 2p stages. Here a pair is two
    actions, and the output of F is sent before B is done: with m at least 2p the bubble is (p - 1) tF. A rank holds the
    activations of 2p + 1 chunks, one more than with ``zb-v``, and splits only a few backwards at both ends.

    With fewer than 2p microbatches the rows are those for 2p, without the missing microbatches.

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step.
        num_chunks: Number of stages on each rank, 2.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size is not accepted.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1, folded in half as in their repository
    DualPipe (dualpipev.py); ``torch.distributed.pipelining`` has it as ScheduleDualPipeV.

    With 2 ranks, 4 microbatches::

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
        rank 1      1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
        dualpipe-v in slots: makespan 19, bubble 2.6%, in flight 5 5
    """
    SIZES.demand("dualpipe-v", num_ranks, num_microbatches, num_chunks)
    full = max(num_microbatches, 2 * num_ranks)

    def row(rank: int) -> list[Action]:
        return [action for action in _row(rank, num_ranks, full) if (action.microbatch or 0) < num_microbatches]

    return Schedule.of("dualpipe-v", map(row, range(num_ranks)))


def dualpipe(num_ranks: int, num_microbatches: int, num_chunks: int = 2, *, replicas: Sequence[int] = ()) -> Schedule:
    """Run DualPipe: microbatches enter at both ends of a pipeline that holds every stage twice.

    In a line of 2p actors with 2p stages, actor i holds the stages i and 2p - 1 - i. The even microbatches 0, 2, 4, ...
    go along the line, the odd ones against it. So the actors i and 2p - 1 - i are two replicas of one rank, which holds
    both stages, as in a V: one takes the even microbatches of the first stage and the odd ones of the second. Each of
    them performs the row of ``dualpipe_v`` for m/2 microbatches, with the same bubble and activations. Gradients are
    summed over the two.

    Args:
        num_ranks: Number of pipeline ranks p, of two replicas each.
        num_microbatches: Number of microbatches m in a step, an even number. The bubble is the least from 4p on.
        num_chunks: Number of stages on each rank, 2.
        replicas: The number of replicas of each rank, 2; empty: 2 each.

    Returns:
        The schedule, of compute actions only, with a row for each replica.

    Raises:
        ScheduleError: If a size is not accepted.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1, figure 5.

    With 1 rank, 4 microbatches::

        rank 0.0  0F0 1F1 0F2 1B1 1F3 0B0 1B3 0I2 0W2
        rank 0.1  0F1 1F0 0F3 1B0 1F2 0B1 1B2 0I3 0W3
        dualpipe in slots: makespan 9, bubble 0.0%, in flight 3 3
    """
    TWICE.demand("dualpipe", num_ranks, num_microbatches, num_chunks)
    if replicas and set(replicas) != {2}:
        numbers = "-".join(map(str, replicas))
        raise ScheduleError(
            f"replicas are {numbers}, but every stage is held twice: give each of {num_ranks} ranks 2 (mesh.rank_dp)"
        )
    folded = dualpipe_v(num_ranks, num_microbatches // 2)

    def row(rank: int, replica: int) -> list[Action]:
        return [_of_replica(action, replica, num_ranks) for action in folded.rows[rank]]

    return Schedule.of("dualpipe", [row(rank, replica) for rank in range(num_ranks) for replica in (0, 1)])


def _of_replica(action: Action, replica: int, num_ranks: int) -> Action:
    """Return an action of a V's rank with the microbatch number for one of two replicas."""
    stage, op, number, _ = action
    assert stage is not None and number is not None
    return Action(stage, op, 2 * number + (replica if stage < num_ranks else 1 - replica))


def _row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Return the row of a rank, for 2p microbatches or more. Chunk 0 goes down the V, chunk 1 comes back up."""
    steps, num_later = VSteps(rank, num_ranks, num_microbatches), num_ranks - 1 - rank
    # 1. Forwards down the V, until the first microbatch is back; then forwards of both stages.
    steps.add(0, *[Op.F] * 2 * num_later)
    for _ in range(rank + 1):
        steps.add(0, Op.F)
        steps.add(1, Op.F)
    # 2. The first backwards, split, so that their gradients are sent early.
    for _ in range(num_later):
        steps.add(1, Op.I, Op.W, Op.F)
    # 3. Steady state: F of one stage beside B of the other.
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        steps.add(0, Op.F)
        steps.add(1, Op.B)
        steps.add(1, Op.F)
        steps.add(0, Op.B)
    # 4. No forwards are left for chunk 0, then none at all; the last W fill the waits.
    for _ in range(num_later):
        steps.add(1, Op.B, Op.F)
        steps.add(0, Op.B)
    for turn in range(2 * (rank + 1)):
        chunk, is_split = 1 - turn % 2, turn > rank
        steps.add_input(chunk) if is_split else steps.add(chunk, Op.B)
    for _ in range(num_later):
        steps.add_weight()
        steps.add_input(0)
    for _ in range(rank + 1):
        steps.add_weight()
    return steps.row
