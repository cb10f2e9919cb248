"""List scheduling: every free rank takes the most urgent ready action, and W where it would wait.

For pipelines whose backwards are split, with any placement of stages on ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from raypar.schedules.action import Action, Op
from raypar.schedules.float_sum import float_sum

NEVER = math.inf
_SAME = 1e-9  # microbatches: the tolerance of the memory bound

Cost = Callable[[Action], float]
Rows = list[list[Action]]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory bound of a rank.

    Attributes:
        most: The bound, in microbatches that pass all stages of a rank.
        kept: The part of a microbatch's activations that a rank holds between I and W.
        shares: By stage: its part of the memory of a microbatch on its rank.
    """

    most: float
    kept: float
    shares: tuple[float, ...]

    @classmethod
    def of(cls, most: float, kept: float, placement: Sequence[int]) -> RankMemory:
        """Return the bound for ranks whose stages are equally large."""
        return cls(most, kept, tuple(1 / placement.count(rank) for rank in placement))

    def allows(self, row: Sequence[Action]) -> bool:
        """Return whether a rank that performs the row never holds more than the bound."""
        held = 0.0
        for action in row:
            held += self.change(action)
            if held > self.most + _SAME:
                return False
        return True

    def change(self, action: Action) -> float:
        """Return the change of the held memory by an action."""
        assert action.stage is not None
        part = {Op.F: 1.0, Op.I: self.kept - 1, Op.W: -self.kept, Op.B: -1.0}[action.op]
        return part * self.shares[action.stage]


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy by which ranks choose among ready actions.

    Attributes:
        fits: While forwards are left: W fills a wait if the wait is at least this part of the W's length.
        tail: The same when no forwards are left.
        slope: Number of forwards by which a stage may be further ahead of its I than the next stage.
        extra: Number of forwards besides the first by which the last stage may be ahead.
    """

    fits: float
    tail: float
    slope: float
    extra: int


class _Stage:
    """A stage: the number of F and I done, and when the values of the next ones arrive."""

    def __init__(self, number: int, num_microbatches: int, most: float) -> None:
        self.number, self.most = number, most
        self.forwards = self.inputs = 0
        self.activations, self.gradients = ([NEVER] * (num_microbatches + 1) for _ in range(2))

    @property
    def activation(self) -> float:
        """When the next F can start; never while the policy forbids it."""
        return self.activations[self.forwards] if self.forwards - self.inputs < self.most else NEVER

    @property
    def gradient(self) -> float:
        """When the next I can start."""
        return self.gradients[self.inputs]


class _Rank:
    """A rank: its stages, the last one first, the memory held, and the W to come."""

    def __init__(self, stages: list[_Stage]) -> None:
        self.stages, self.now, self.held = stages, 0.0, 0.0
        self.weights = deque[Action]()
        self.row: list[Action] = []


@dataclass
class ListScheduling:
    """Performs a step by a policy, event by event.

    A rank takes a ready I; else a ready F, if memory and policy allow it; else a W. Of several it takes the one of the
    last stage.

    Attributes:
        placement: The rank of each stage.
        num_microbatches: Number of microbatches m in a step.
        cost: How long an F, I or W lasts.
        link: Time from the end of a compute action to the arrival of its value on another rank, in the same unit.
        memory: The memory bound of a rank, at least one microbatch.
        policy: The policy by which ranks choose.
    """

    placement: Sequence[int]
    num_microbatches: int
    cost: Cost
    link: float
    memory: RankMemory
    policy: Policy

    def __post_init__(self) -> None:
        last, slope = len(self.placement) - 1, self.policy.slope
        self._stages = [
            _Stage(stage, self.num_microbatches, slope * (last - stage) + 1 + self.policy.extra)
            for stage in range(last + 1)
        ]
        self._stages[0].activations[:-1] = [0.0] * self.num_microbatches
        self._ranks = [
            _Rank([stage for stage in reversed(self._stages) if self.placement[stage.number] == rank])
            for rank in range(max(self.placement) + 1)
        ]
        self._free = [(0.0, rank) for rank in range(len(self._ranks))]

    def rows(self) -> Rows:
        """Return the rows."""
        heapify(self._free)
        while self._free:
            time, number = heappop(self._free)
            rank = self._ranks[number]
            if time < rank.now:
                continue  # it has been busy since
            action, later = self._choice(rank, time)
            if action is not None:
                self._perform(rank, action, time)
                heappush(self._free, (rank.now, number))
            elif later < NEVER:
                heappush(self._free, (later, number))
            # Otherwise the next value that arrives wakes it.
        return [rank.row for rank in self._ranks]

    def _choice(self, rank: _Rank, time: float) -> tuple[Action | None, float]:
        """Return the next action of a rank; or None, and when it may have one."""
        later = NEVER
        for stage in rank.stages:
            if stage.gradient <= time:
                return Action(stage.number, Op.I, stage.inputs), time
            later = min(later, stage.gradient)
        room, shares = self.memory.most + _SAME - rank.held, self.memory.shares
        for at, stage in enumerate(rank.stages):
            # Its microbatch comes back to the later stages of the rank, which must have memory then.
            back = float_sum((stage.forwards + 1 - other.forwards) * shares[other.number] for other in rank.stages[:at])
            if shares[stage.number] + back > room:
                continue
            if stage.activation <= time:
                return Action(stage.number, Op.F, stage.forwards), time
            later = min(later, stage.activation)
        if rank.weights:
            is_tail = all(stage.forwards == self.num_microbatches for stage in rank.stages)
            part = self.policy.tail if is_tail else self.policy.fits
            if time + part * self.cost(rank.weights[0]) <= later:
                return rank.weights[0], time
        return None, later

    def _perform(self, rank: _Rank, action: Action, time: float) -> None:
        number, op, microbatch, _ = action
        assert number is not None and microbatch is not None
        rank.row.append(action)
        rank.now = time + self.cost(action)
        rank.held += self.memory.change(action)
        stage = self._stages[number]
        if op is Op.F:
            stage.forwards += 1
            if number + 1 < len(self._stages):
                self._arrive(rank.now, number, number + 1, microbatch, Op.F)
            else:
                stage.gradients[microbatch] = rank.now
        elif op is Op.I:
            stage.inputs += 1
            rank.weights.append(action._replace(op=Op.W))
            if number:
                self._arrive(rank.now, number, number - 1, microbatch, Op.I)
        else:
            rank.weights.popleft()

    def _arrive(self, time: float, number: int, other: int, microbatch: int, op: Op) -> None:
        """Record when the value of another stage arrives at a stage."""
        there = self.placement[other]
        if there != self.placement[number]:
            time += self.link
        stage = self._stages[other]
        (stage.activations if op is Op.F else stage.gradients)[microbatch] = time
        heappush(self._free, (max(time, self._ranks[there].now), there))
