"""Splitting backwards into I and W: input gradients are sent before weight gradients, which fill the waits of a
pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from raypar.schedules.action import RECVS, SENDS, Action, Op
from raypar.schedules.rules import USES_WEIGHTS, most_held, partner, rank_of
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.simulate import Costs

_OVERHEAD = 0.02  # of a backward: the cost of splitting it, on CPUs
_FITS = 0.4  # of a W: a shorter wait stays unfilled, because filling it would lengthen it by more
_BUDGET = 250_000  # actions that each half of a search may try: about half a second


def split_backward(schedule: Schedule, costs: Costs, *, every: bool = False, hold: bool = True) -> Schedule:
    """Split backwards of a schedule into I and W: ``2B7 2SEND_B7`` becomes ``2I7 2SEND_B7``, and ``2W7`` comes later,
    where the rank would wait.

    A search that simulates the schedule chooses how many of the last backwards of each rank are split, and how many W a
    rank may postpone at a time. Every stage sums its gradients in the same order as before, so the numbers have the
    same bits, and reductions over replicas have the same positions. No rank holds more microbatches than the rank that
    held most before; a postponed W counts as one.

    Args:
        schedule: The schedule, lowered, which has passed ``check``. Check the returned rows again.
        costs: The durations of F, B, I, W, UNSHARD, REDUCE_GRAD and STEP, and the link between ranks; in any unit.
        every: Split every backward, and not only those that make the step shorter. Where no gradient is sent to another
            rank, W follows I at once.
        hold: A W may come later than its SEND. It holds a microbatch's activations until then.

    Returns:
        The schedule with other rows, or the same object if no backward is split. If the schedule already has I and W,
        only ``every`` splits further backwards: then each W follows its SEND.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sections 2 and 3.
    """
    if any(action.op in (Op.I, Op.W) for row in schedule.rows for action in row):
        return _with_rows(schedule, [list(_split_in_place(row)) for row in schedule.rows]) if every else schedule
    simulation = _Simulation(schedule, costs, every=every)
    if every:
        lefts = (*_down(simulation.most_held), 0) if hold else (0,)
        tried = [
            simulation.attempt(simulation.splittable, left)
            for left in lefts
            if simulation.spent < _BUDGET or left == lefts[0]
        ]
        return _with_rows(schedule, min(tried).rows)
    return _with_rows(schedule, _searched(simulation, hold=hold).rows)


def _searched(simulation: _Simulation, *, hold: bool) -> _Attempt:
    """Return the best attempt: first with the same number of backwards on every rank, then rank by rank."""
    best = simulation.whole
    for most in _down(max(simulation.splittable)):
        for left in (*_down(simulation.most_held), 0) if hold else (0,):
            if simulation.spent < _BUDGET:
                best = min(best, simulation.attempt([min(most, count) for count in simulation.splittable], left))
    for rank, count in enumerate(simulation.splittable):
        for most in (*_down(count), 0):
            if simulation.spent < 2 * _BUDGET:
                best = min(best, simulation.attempt([*best.split[:rank], most, *best.split[rank + 1 :]], best.left))
    return best


def _with_rows(schedule: Schedule, rows: Sequence[Sequence[Action]]) -> Schedule:
    split = replace(schedule, rows=tuple(map(tuple, rows)))
    return schedule if split == schedule else split


def _split_in_place(row: Sequence[Action]) -> Iterator[Action]:
    """Yield the row with every B replaced by I, its SEND if that comes next, and W."""
    later: Action | None = None
    for at, action in enumerate(row):
        if action.op is Op.B:
            yield action._replace(op=Op.I)
            later = action._replace(op=Op.W)
        else:
            yield action
        if later is not None and not _leaves(row, at + 1):
            yield later
            later = None


def _down(most: int) -> Iterator[int]:
    """Yield some numbers from ``most`` to 1: each a third smaller than the one before, and from 8 on all of them."""
    while most:
        yield most
        most = min(most - 1, most * 2 // 3) if most > 8 else most - 1


@dataclass(frozen=True)
class _Attempt:
    """Rows with ``split`` backwards of each rank split, and at most ``left`` W postponed at a time.

    The better of two ends earlier by a thousandth or more; else it postpones or splits fewer.
    """

    makespan: float  # as a multiple of the makespan with whole backwards
    left: int
    split: list[int]
    rows: list[list[Action]]

    def __lt__(self, other: _Attempt) -> bool:
        return self._rank < other._rank

    @property
    def _rank(self) -> tuple[float, int, float, int]:
        return round(self.makespan, 3), self.left, self.makespan, sum(self.split)


class _Simulation:
    """Simulates a schedule with the last backwards of each rank split.

    A backward may be split if its gradient is sent to another rank, or if ``every`` one is split.
    """

    def __init__(self, schedule: Schedule, costs: Costs, *, every: bool) -> None:
        self._schedule, self._costs = schedule, costs
        self._positions = [
            [at for at, action in enumerate(row) if action.op is Op.B and (every or _leaves(row, at + 1))]
            for row in schedule.rows
        ]
        self._cost = {action: costs.of(action) for row in schedule.rows for action in row if action.op in _LASTING}
        self.most_held = max(map(most_held, schedule.rows))
        self.splittable = list(map(len, self._positions))
        self.spent = 0  # actions that were simulated
        self._unit = 1.0
        whole = self.attempt([0] * schedule.num_ranks, 0)
        self._unit = whole.makespan or 1.0
        self.whole = replace(whole, makespan=whole.makespan / self._unit)

    def attempt(self, split: list[int], left: int) -> _Attempt:
        """Simulate the rows with ``split`` backwards of each rank split, and ``left`` W postponed at a time."""
        self.spent += sum(map(len, self._schedule.rows))
        ranks = [
            _Rank(row, set(positions[len(positions) - most :]))
            for row, positions, most in zip(self._schedule.rows, self._positions, split, strict=True)
        ]
        arrived: dict[Action, float] = {}  # by RECV: when its value is there
        waiting = deque(range(len(ranks)))
        while waiting:
            waiting += self._advance(ranks[waiting.popleft()], arrived, left)
        return _Attempt(max(rank.now for rank in ranks) / self._unit, left, split, [rank.done for rank in ranks])

    def _advance(self, rank: _Rank, arrived: dict[Action, float], left: int) -> list[int]:
        """Perform a rank's actions until it waits for another rank; return the ranks that may go on now."""
        costs, freed = self._costs, []
        while rank.at < len(rank.row):
            action = rank.row[rank.at]
            stage, op, _, _ = action
            if op in RECVS:
                if action not in arrived:
                    break
                while rank.later and rank.now + _FITS * self._later(rank) <= arrived[action]:
                    self._perform_weight(rank)
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
                    self._perform_weight(rank)
                rank.held += 1
            else:
                while any(stage in (None, later.stage) for later in rank.later):
                    self._perform_weight(rank)
                rank.held -= op is Op.B
            if op in USES_WEIGHTS:
                rank.now = max(rank.now, rank.gathered.get(stage, 0.0))
            if op in _LASTING:
                rank.now += self._lasts(action)
            rank.done.append(action)
            rank.at += 1
            if (op in SENDS or action.op is Op.I) and not _leaves(rank.row, rank.at):  # SENDs come before any W
                while len(rank.later) > (left if op in SENDS else 0):
                    self._perform_weight(rank)
        else:
            while rank.later:
                self._perform_weight(rank)
        return freed

    def _perform_weight(self, rank: _Rank) -> None:
        """Perform the oldest postponed W."""
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
    """A simulated rank: its row, the actions done, the postponed W, and its current time."""

    def __init__(self, row: Sequence[Action], split: set[int]) -> None:
        self.row = row
        self.split = split
        self.at = 0
        self.now = 0.0
        self.held = 0
        self.link = 0.0  # when the last gather is over
        self.gathered: dict[int | None, float] = {}  # by stage: when its weights have arrived
        self.done: list[Action] = []
        self.later: deque[Action] = deque()


_LASTING = frozenset({Op.F, Op.B, Op.REDUCE_GRAD, Op.STEP})


def _leaves(row: Sequence[Action], at: int) -> bool:
    """Return whether the action at a position sends the gradient of the action right before its SENDs."""
    if at >= len(row) or row[at].op is not Op.SEND_B:
        return False
    send = row[at]._replace(peer=None)
    return row[at - 1]._replace(peer=None) in (send, send._replace(op=Op.B))
