"""Backwards in halves: gradients leave before the weights' gradients are made, which fill the waits of a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from raypar.schedules.action import RECVS, SENDS, Action, Op
from raypar.schedules.rules import HOLDS, partner
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.simulate import Costs

_OVERHEAD = 0.02  # of a backward: what it costs to do it in halves, on CPUs
_FITS = 0.4  # of a W: a shorter wait is left alone, for to fill it would lengthen it by more
_BUDGET = 250_000  # actions that each half of a search may try: about half a second


def in_halves(schedule: Schedule, costs: Costs, *, hold: bool = True) -> Schedule:
    """A lowered schedule as actors perform it: of some backwards ``2B7 2SEND_B7`` becomes ``2I7 2SEND_B7``, and ``2W7``
    comes later, where the rank would wait (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sections 2 and 3).

    Which ones, and how many W a rank may leave at a time, a search finds out that performs the schedule on paper, with
    these costs: the last so many of each rank. Every stage adds up its gradients in the order of before, so the numbers
    have the same bits, and sums over replicas begin where they did. No rank holds more microbatches than that which
    held most, of which a W that is to come counts as one; without ``hold`` each W follows its SEND. A schedule that has
    halves itself stays as it is.
    """
    if any(action.op in (Op.I, Op.W) for row in schedule.rows for action in row):
        return schedule
    paper = _Paper(schedule, costs)
    best = paper.whole
    for most in _down(max(paper.sends)):
        for left in (*_down(paper.most_held), 0) if hold else (0,):
            if paper.spent < _BUDGET:
                best = min(best, paper.attempt([min(most, sends) for sends in paper.sends], left))
    for rank, sends in enumerate(paper.sends):
        for most in (*_down(sends), 0):
            if paper.spent < 2 * _BUDGET:
                best = min(best, paper.attempt([*best.halved[:rank], most, *best.halved[rank + 1 :]], best.left))
    return replace(schedule, rows=tuple(map(tuple, best.rows)))


def _down(most: int) -> Iterator[int]:
    """Some numbers from ``most`` to 1: each a third smaller than the one before, and from 8 on all of them."""
    while most:
        yield most
        most = min(most - 1, most * 2 // 3) if most > 8 else most - 1


@dataclass(frozen=True)
class _Attempt:
    """Rows with so many backwards of each rank in halves, and so many W left at a time.

    The better one is over sooner; if not by a thousandth, the one that leaves less, or has fewer halves.
    """

    makespan: float  # in multiples of that without halves
    left: int
    halved: list[int]
    rows: list[list[Action]]

    def __lt__(self, other: _Attempt) -> bool:
        return self._rank < other._rank

    @property
    def _rank(self) -> tuple[float, int, float, int]:
        return round(self.makespan, 3), self.left, self.makespan, sum(self.halved)


class _Paper:
    """Performs a schedule on paper, with the last backwards of each rank in halves."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule, self._costs = schedule, costs
        self._sends = [[at for at in range(1, len(row)) if _leaves(row, at)] for row in schedule.rows]
        self._cost = {action: costs.of(action) for row in schedule.rows for action in row if action.op in _LASTING}
        self.most_held = max(_most_held(row) for row in schedule.rows)
        self.sends = [len(sends) for sends in self._sends]
        self.spent = 0  # actions that were performed
        self._unit = 1.0
        whole = self.attempt([0] * schedule.num_ranks, 0)
        self._unit = whole.makespan or 1.0
        self.whole = replace(whole, makespan=whole.makespan / self._unit)

    def attempt(self, halved: list[int], left: int) -> _Attempt:
        """The rows, if so many backwards of each rank are in halves, and when they are over."""
        self.spent += sum(map(len, self._schedule.rows))
        ranks = [
            _Rank(row, {at - 1 for at in sends[len(sends) - most :]})
            for row, sends, most in zip(self._schedule.rows, self._sends, halved, strict=True)
        ]
        arrived: dict[Action, float] = {}  # by RECV: when its value is there
        waiting = deque(range(len(ranks)))
        while waiting:
            waiting += self._advance(ranks[waiting.popleft()], arrived, left)
        return _Attempt(max(rank.now for rank in ranks) / self._unit, left, halved, [rank.done for rank in ranks])

    def _advance(self, rank: _Rank, arrived: dict[Action, float], left: int) -> list[int]:
        """Perform a rank's actions up to where it waits for others; these ranks may go on then."""
        costs, placement, freed = self._costs, self._schedule.placement, []
        while rank.at < len(rank.row):
            action = rank.row[rank.at]
            stage, op, _ = action
            if op in RECVS:
                if action not in arrived:
                    break
                while rank.later and rank.now + _FITS * self._later(rank) <= arrived[action]:
                    self._pay(rank)
                rank.now = max(rank.now, arrived[action])
            elif op in SENDS:
                there = partner(action)
                arrived[there] = rank.now + costs.link
                assert there.stage is not None
                freed.append(placement[there.stage])
            elif op is Op.B and rank.at in rank.halved:
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
            if op in _LASTING:
                rank.now += self._lasts(action)
            rank.done.append(action)
            rank.at += 1
            while len(rank.later) > left and op in SENDS:
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

    def __init__(self, row: Sequence[Action], halved: set[int]) -> None:
        self.row, self.halved, self.at, self.now, self.held = row, halved, 0, 0.0, 0
        self.done: list[Action] = []
        self.later: deque[Action] = deque()


_LASTING = frozenset({Op.F, Op.B, Op.REDUCE_GRAD, Op.STEP})


def _leaves(row: Sequence[Action], at: int) -> bool:
    """Whether a gradient leaves there that was made right before."""
    return row[at].op is Op.SEND_B and row[at - 1] == row[at]._replace(op=Op.B)


def _most_held(row: Sequence[Action]) -> int:
    """Most microbatches whose forward is done and whose backward is not, over the stages of a rank."""
    held = most = 0
    for action in row:
        held += HOLDS.get(action.op, 0)
        most = max(most, held)
    return most
