"""Splitting backwards into I and W: gradients leave before those of the weights are made, which fill the waits of a
pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from raypar.schedules.action import RECVS, SENDS, Action, Op
from raypar.schedules.rules import HOLDS, USES_WEIGHTS, partner, rank_of
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.simulate import Costs

_OVERHEAD = 0.02  # of a backward: what it costs to split it, on CPUs
_FITS = 0.4  # of a W: a shorter wait is left alone, for to fill it would lengthen it by more
_BUDGET = 250_000  # actions that each half of a search may try: about half a second


def split_backward(schedule: Schedule, costs: Costs, *, every: bool = False, hold: bool = True) -> Schedule:
    """Split backwards of a schedule into I and W: of ``2B7 2SEND_B7`` becomes ``2I7 2SEND_B7``, and ``2W7`` comes
    later, where the rank would wait.

    Which backwards, and how many W a rank may leave at a time, a search finds that performs the schedule on paper: the
    last so many of each rank. Every stage adds up its gradients in the order of before, so the numbers have the same
    bits, and sums over replicas begin where they did. No rank holds more microbatches than the one that held most, of
    which a W that is to come counts as one.

    Args:
        schedule: lowered, and sound: ``check`` has passed it. The rows that are returned are to be checked again.
        costs: what F, B, I, W, UNSHARD, REDUCE_GRAD and STEP last, and the link between ranks; in any unit.
        every: split every backward, and not only those that make the step shorter. Where no gradient leaves for another
            rank, W follows I at once.
        hold: a W may come later than its SEND. It keeps a microbatch's activations until then.

    Returns:
        The schedule with other rows, or the same object if no backward is split. Of a schedule that has I and W itself
        only ``every`` splits the others: there each W follows its SEND.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sections 2 and 3.
    """
    if any(action.op in (Op.I, Op.W) for row in schedule.rows for action in row):
        return _with_rows(schedule, [list(_split_in_place(row)) for row in schedule.rows]) if every else schedule
    paper = _Paper(schedule, costs, every=every)
    if every:
        lefts = (*_down(paper.most_held), 0) if hold else (0,)
        tried = [paper.attempt(paper.splittable, left) for left in lefts if paper.spent < _BUDGET or left == lefts[0]]
        return _with_rows(schedule, min(tried).rows)
    return _with_rows(schedule, _searched(paper, hold=hold).rows)


def _searched(paper: _Paper, *, hold: bool) -> _Attempt:
    """The best attempt: the same number of the last backwards of every rank first, then rank by rank."""
    best = paper.whole
    for most in _down(max(paper.splittable)):
        for left in (*_down(paper.most_held), 0) if hold else (0,):
            if paper.spent < _BUDGET:
                best = min(best, paper.attempt([min(most, count) for count in paper.splittable], left))
    for rank, count in enumerate(paper.splittable):
        for most in (*_down(count), 0):
            if paper.spent < 2 * _BUDGET:
                best = min(best, paper.attempt([*best.split[:rank], most, *best.split[rank + 1 :]], best.left))
    return best


def _with_rows(schedule: Schedule, rows: Sequence[Sequence[Action]]) -> Schedule:
    split = replace(schedule, rows=tuple(map(tuple, rows)))
    return schedule if split == schedule else split


def _split_in_place(row: Sequence[Action]) -> Iterator[Action]:
    """The row with every B as I, its SEND if it stands right behind, and W."""
    owed: Action | None = None
    for at, action in enumerate(row):
        if action.op is Op.B:
            yield action._replace(op=Op.I)
            owed = action._replace(op=Op.W)
        else:
            yield action
        if owed is not None and not _leaves(row, at + 1):
            yield owed
            owed = None


def _down(most: int) -> Iterator[int]:
    """Some numbers from ``most`` to 1: each a third smaller than the one before, and from 8 on all of them."""
    while most:
        yield most
        most = min(most - 1, most * 2 // 3) if most > 8 else most - 1


@dataclass(frozen=True)
class _Attempt:
    """Rows with so many backwards of each rank split, and so many W left at a time.

    The better one is over sooner; if not by a thousandth, the one that leaves less, or splits fewer.
    """

    makespan: float  # in multiples of that of whole backwards
    left: int
    split: list[int]
    rows: list[list[Action]]

    def __lt__(self, other: _Attempt) -> bool:
        return self._rank < other._rank

    @property
    def _rank(self) -> tuple[float, int, float, int]:
        return round(self.makespan, 3), self.left, self.makespan, sum(self.split)


class _Paper:
    """Performs a schedule on paper, with the last backwards of each rank split.

    Those whose gradient leaves for another rank, or ``every`` one, may be.
    """

    def __init__(self, schedule: Schedule, costs: Costs, *, every: bool) -> None:
        self._schedule, self._costs = schedule, costs
        self._places = [
            [at for at, action in enumerate(row) if action.op is Op.B and (every or _leaves(row, at + 1))]
            for row in schedule.rows
        ]
        self._cost = {action: costs.of(action) for row in schedule.rows for action in row if action.op in _LASTING}
        self.most_held = max(_most_held(row) for row in schedule.rows)
        self.splittable = list(map(len, self._places))
        self.spent = 0  # actions that were performed
        self._unit = 1.0
        whole = self.attempt([0] * schedule.num_ranks, 0)
        self._unit = whole.makespan or 1.0
        self.whole = replace(whole, makespan=whole.makespan / self._unit)

    def attempt(self, split: list[int], left: int) -> _Attempt:
        """The rows, if so many backwards of each rank are split, and when they are over."""
        self.spent += sum(map(len, self._schedule.rows))
        ranks = [
            _Rank(row, set(places[len(places) - most :]))
            for row, places, most in zip(self._schedule.rows, self._places, split, strict=True)
        ]
        arrived: dict[Action, float] = {}  # by RECV: when its value is there
        waiting = deque(range(len(ranks)))
        while waiting:
            waiting += self._advance(ranks[waiting.popleft()], arrived, left)
        return _Attempt(max(rank.now for rank in ranks) / self._unit, left, split, [rank.done for rank in ranks])

    def _advance(self, rank: _Rank, arrived: dict[Action, float], left: int) -> list[int]:
        """Perform a rank's actions up to where it waits for others; these ranks may go on then."""
        costs, freed = self._costs, []
        while rank.at < len(rank.row):
            action = rank.row[rank.at]
            stage, op, _, _ = action
            if op in RECVS:
                if action not in arrived:
                    break
                while rank.later and rank.now + _FITS * self._later(rank) <= arrived[action]:
                    self._pay(rank)
                rank.now = max(rank.now, arrived[action])
            elif op in SENDS:
                there = partner(action)
                arrived[there] = rank.now + costs.link
                freed.append(rank_of(there, self._schedule))
            elif op is Op.UNSHARD:
                rank.link = max(rank.link, rank.now) + costs.of(action)
                rank.gathered[stage] = rank.link
            elif op is Op.RESHARD:
                pass  # a W needs no weights: it may come later
            elif op is Op.B and rank.at in rank.split:
                action = action._replace(op=Op.I)
                rank.later.append(action._replace(op=Op.W))
            elif op is Op.F:
                while rank.held >= self.most_held and rank.later:
                    self._pay(rank)
                rank.held += 1
            else:
                while any(stage in (None, later.stage) for later in rank.later):
                    self._pay(rank)
                rank.held -= op is Op.B
            if op in USES_WEIGHTS:
                rank.now = max(rank.now, rank.gathered.get(stage, 0.0))
            if op in _LASTING:
                rank.now += self._lasts(action)
            rank.done.append(action)
            rank.at += 1
            if (op in SENDS or action.op is Op.I) and not _leaves(rank.row, rank.at):  # SENDs come before any W
                while len(rank.later) > (left if op in SENDS else 0):
                    self._pay(rank)
        else:
            while rank.later:
                self._pay(rank)
        return freed

    def _pay(self, rank: _Rank) -> None:
        """Make the oldest of the weights' gradients that are to come."""
        rank.now += self._later(rank)
        rank.done.append(rank.later.popleft())
        rank.held -= 1

    def _later(self, rank: _Rank) -> float:
        return self._lasts(rank.later[0])

    def _lasts(self, action: Action) -> float:
        if action.op not in (Op.I, Op.W):
            return self._cost[action]
        return self._costs.of(action) + _OVERHEAD / 2 * self._cost[action._replace(op=Op.B)]


class _Rank:
    """A rank on paper: its row, what it has done of it and what is to come, and what time it is there."""

    def __init__(self, row: Sequence[Action], split: set[int]) -> None:
        self.row = row
        self.split = split
        self.at = 0
        self.now = 0.0
        self.held = 0
        self.link = 0.0  # when the last gather is over
        self.gathered: dict[int | None, float] = {}  # by stage: when its weights are there
        self.done: list[Action] = []
        self.later: deque[Action] = deque()


_LASTING = frozenset({Op.F, Op.B, Op.REDUCE_GRAD, Op.STEP})


def _leaves(row: Sequence[Action], at: int) -> bool:
    """Whether a gradient leaves there that was made right before, by an action in front of its SENDs."""
    if at >= len(row) or row[at].op is not Op.SEND_B:
        return False
    send = row[at]._replace(peer=None)
    return row[at - 1]._replace(peer=None) in (send, send._replace(op=Op.B))


def _most_held(row: Sequence[Action]) -> int:
    """Most microbatches whose forward is done and whose backward is not, over the stages of a rank."""
    held = most = 0
    for action in row:
        held += HOLDS.get(action.op, 0)
        most = max(most, held)
    return most
