"""V-shaped schedules: rank s holds the stages s and 2p - 1 - s, so that a microbatch turns around on the last rank and
its loss is computed on the first, without a message between the two stages of either rank."""

from __future__ import annotations

from collections import deque
from itertools import product
from typing import NamedTuple

from raypar.schedules.action import Action, Op
from raypar.schedules.generators.entry import Sizes
from raypar.schedules.generators.v_steps import VSteps
from raypar.schedules.rules import HOLDS, most_held
from raypar.schedules.schedule import Schedule

SIZES = Sizes(min_chunks=2, max_chunks=2, hint="a V has two stages a rank, leave chunks out, or set it to 2")


def zb_v(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Run ZB-V: the memory of 1F1B, and no bubble where all halves last equally long.

    Every rank holds the activations of 2p chunks, which are those of p microbatches. With tF = tI = tW and m at least
    2p no rank waits between its first action and its last.

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step.
        num_chunks: Number of stages on each rank, 2.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size is not accepted.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6.

    With 2 ranks, 4 microbatches::

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        rank 1      1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
        zb-v in slots: makespan 25, bubble 4.0%, in flight 4 4
    """
    SIZES.demand("zb-v", num_ranks, num_microbatches, num_chunks)
    return Schedule.of("zb-v", (_zero_bubble_row(rank, num_ranks, num_microbatches) for rank in range(num_ranks)))


def v_half(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Run V-Half: half the memory of 1F1B, and about half its bubble.

    A rank holds the activations of p + 3 chunks at the most, where 1F1B holds 2p. With tF = tI = tW the bubble is
    about 3 (p - 1) tF chunks.

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step.
        num_chunks: Number of stages on each rank, 2.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size is not accepted.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3.

    With 3 ranks, 2 microbatches::

        rank 0  0F0 0F1             5F0 5I0 5W0     5F1 5I1 0I0 5W1 0W0     0I1 0W1
        rank 1      1F0         4F0 1F1     4I0 4F1 4W0 1I0 4I1 1W0 4W1 1I1 1W1
        rank 2          2F0 3F0         2F1 3F1 3I0 2I0 3W0 2W0 3I1 2I1 3W1 2W1
        v-half in slots: makespan 17, bubble 29.4%, in flight 3 4 4
    """
    SIZES.demand("v-half", num_ranks, num_microbatches, num_chunks)
    return _repeated("v-half", _Hops(2, 1, 2, 1), num_ranks, num_microbatches)


def v_min(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Run V-Min: a third of the memory of 1F1B, and about two thirds of its bubble.

    A rank holds the activations of 2p/3 + 3 chunks at the most, where 1F1B holds 2p. It is sensitive to stages that
    last longer than others.

    Args:
        num_ranks: Number of pipeline ranks p.
        num_microbatches: Number of microbatches m in a step.
        num_chunks: Number of stages on each rank, 2.

    Returns:
        The schedule, of compute actions only.

    Raises:
        ScheduleError: If a size is not accepted.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3.

    With 3 ranks, 2 microbatches::

        rank 0  0F0                 5F0 0F1 5I0 5W0         5F1     0I0 5I1 0W0 5W1         0I1 0W1
        rank 1      1F0         4F0         1F1 4I0 4W0 4F1     1I0 1W0     4I1 4W1     1I1 1W1
        rank 2          2F0 3F0                 2F1 3F1 3I0 2I0 3W0 2W0         3I1 2I1 3W1 2W1
        v-min in slots: makespan 21, bubble 42.9%, in flight 3 3 4
    """
    SIZES.demand("v-min", num_ranks, num_microbatches, num_chunks)
    return _repeated("v-min", _Hops(1, 1, 1, 1), num_ranks, num_microbatches)


def _zero_bubble_row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    steps, num_left = VSteps(rank, num_ranks, num_microbatches), num_ranks - rank
    # 1. Forwards down the V, until the first microbatch is back.
    for _ in range(2 * num_left - 1):
        steps.add(0, Op.F)
    for _ in range(rank):
        steps.add(1, Op.F)
        steps.add(0, Op.F)
    for _ in range(num_left):
        steps.add(1, Op.F, Op.I, Op.W)
    # 2. A whole microbatch of one stage, and one of the other, in turn.
    while steps.left(1, Op.F):
        steps.add(0, Op.F, Op.I, Op.W)
        steps.add(1, Op.F, Op.I, Op.W)
    # 3. First the I that other ranks wait for; W fills the waits.
    for _ in range(rank):
        steps.add(0, Op.I)
        steps.add(1, Op.I)
    for _ in range(num_left):
        steps.add(0, Op.I, Op.W)
    for chunk, op in ((0, Op.I), (1, Op.I), (1, Op.W), (0, Op.W)):
        steps.add(chunk, *[op] * steps.left(chunk, op))
    return steps.row


_PERIOD = 6  # slots: F, I and W of both stages of a rank


class _Hops(NamedTuple):
    """The slots between an action of a microbatch on one rank and the same action on the next rank.

    The sum says how long a rank holds activations, and so how many: 4 / 12 of those of 1F1B, up to 12 / 12.

    Attributes:
        down: Forwards down the V.
        up: Forwards back up.
        back_down: Backwards of the stages that come up, which go down.
        back_up: Backwards of the others.
    """

    down: int
    up: int
    back_down: int
    back_up: int


def _repeated(name: str, hops: _Hops, num_ranks: int, num_microbatches: int) -> Schedule:
    """Repeat a building block once every six slots, and let W fill the waits at the beginning and the end."""
    block = _block(hops, num_ranks)
    timed = [
        sorted(
            (time + _PERIOD * microbatch, Action(stage, op, microbatch))
            for (stage, op), time in of_rank.items()
            for microbatch in range(num_microbatches)
        )
        for of_rank in block
    ]
    return Schedule.of(name, _filled([[action for _, action in row] for row in timed]))


Block = list[dict[tuple[int, Op], int]]  # by rank, when it performs each action of microbatch 0


def _block(hops: _Hops, num_ranks: int) -> Block:
    """Return a building block: the slots of microbatch 0, such that no rank has two actions in one slot if it repeats.

    The block turns around three times: from down to up, to the backwards, and to their way back. Its waits there are
    free; the shortest ones are chosen with which all actions of every rank fall into different slots.
    """
    for waits in sorted(product(range(1, _PERIOD + 1), repeat=3), key=sum):
        block = [_slots(hops, waits, rank, num_ranks) for rank in range(num_ranks)]
        if all(len({time % _PERIOD for time in of_rank.values()}) == 4 for of_rank in block):
            return [_with_weights(of_rank) for of_rank in block]
    raise AssertionError(f"no waits fit {hops}")


def _slots(hops: _Hops, waits: tuple[int, ...], rank: int, num_ranks: int) -> dict[tuple[int, Op], int]:
    last, down, up = num_ranks - 1, rank, 2 * num_ranks - 1 - rank
    turned = hops.down * last + waits[0]
    backwards = turned + hops.up * last + waits[1]
    returned = backwards + hops.back_down * last + waits[2]
    return {
        (down, Op.F): hops.down * rank,
        (up, Op.F): turned + hops.up * (last - rank),
        (up, Op.I): backwards + hops.back_down * rank,
        (down, Op.I): returned + hops.back_up * (last - rank),
    }


def _with_weights(slots: dict[tuple[int, Op], int]) -> dict[tuple[int, Op], int]:
    """Add the W of both stages, each in the first slot after its I that is free."""
    taken, every = {time % _PERIOD for time in slots.values()}, dict(slots)
    for time, stage in sorted((time, stage) for (stage, op), time in slots.items() if op is Op.I):
        free = next(slot for slot in range(time + 1, time + 1 + _PERIOD) if slot % _PERIOD not in taken)
        taken.add(free % _PERIOD)
        every[stage, Op.W] = free
    return every


def _filled(rows: list[list[Action]]) -> list[list[Action]]:
    """Perform rows slot by slot, in their order of F and I, with each W where its rank would wait.

    No rank holds more chunks' activations than the rank that holds most in ``rows``: it performs a W first.
    """
    most, last = max(map(most_held, rows)), 2 * len(rows) - 1
    ranks = [_Rank(row) for row in rows]
    done: dict[Action, int] = {}  # the slot
    slot = 0
    while any(rank.is_busy for rank in ranks):
        for rank in ranks:
            rank.perform(slot, done, last, most)
        slot += 1
    return [rank.row for rank in ranks]


class _Rank:
    """A rank that performs its F and I in order, and its W when it waits."""

    def __init__(self, row: list[Action]) -> None:
        self._ahead = deque(action for action in row if action.op is not Op.W)
        self._later, self._held = deque[Action](), 0
        self.row: list[Action] = []

    @property
    def is_busy(self) -> bool:
        """Whether an action is to come."""
        return bool(self._ahead or self._later)

    def perform(self, slot: int, done: dict[Action, int], last: int, most: int) -> None:
        """Perform an action in a slot, if one is ready.

        Args:
            slot: The slot.
            done: The slots of all actions before it; this one is added.
            last: The last stage.
            most: Number of chunks whose activations may be held.
        """
        if self._ahead and self._can(self._ahead[0], slot, done, last, most):
            action = self._ahead.popleft()
            if action.op is Op.I:
                self._later.append(action._replace(op=Op.W))
        elif self._later:
            action = self._later.popleft()
        else:
            return
        self._held += HOLDS.get(action.op, 0)
        self.row.append(action)
        done[action] = slot

    def _can(self, action: Action, slot: int, done: dict[Action, int], last: int, most: int) -> bool:
        if action.op is Op.F and self._held >= most:
            return False
        if action.op is Op.F and action.stage == 0:
            return True
        assert action.stage is not None
        before = (
            action._replace(stage=action.stage - 1) if action.op is Op.F else action._replace(stage=action.stage + 1)
        )
        if action.op is Op.I and action.stage == last:
            before = action._replace(op=Op.F)
        return done.get(before, slot) < slot
