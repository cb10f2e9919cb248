"""List scheduling: every rank that is free takes the most urgent action that is ready, and W where it would wait.

For pipelines of one stage a rank, whose backwards are split.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from raypar.schedules.action import Action, Op

NEVER = math.inf
_SAME = 1e-9  # microbatches: how exactly memory is counted

Cost = Callable[[Action], float]


@dataclass(frozen=True, slots=True)
class Memory:
    """What a rank may hold.

    Attributes:
        most: The bound, in activations of a microbatch.
        kept: The part of a microbatch's activations that a rank holds between I and W.
    """

    most: float
    kept: float = 1.0

    def allows(self, row: list[Action]) -> bool:
        """Return whether a rank that performs the row never holds more than the bound."""
        held = 0.0
        for action in row:
            held += {Op.F: 1.0, Op.I: self.kept - 1, Op.W: -self.kept, Op.B: -1.0}[action.op]
            if held > self.most + _SAME:
                return False
        return True


@dataclass(frozen=True, slots=True)
class Policy:
    """How ranks choose between what they could do.

    Attributes:
        fits: The part of a W that a wait has to be long, for W to fill it, while there are forwards to come.
        tail: The same afterwards.
        slope: How many more forwards may be ahead of their I on a rank than on the next one.
        extra: How many more than one may be ahead on the last rank.
    """

    fits: float
    tail: float
    slope: float
    extra: int


class _Rank:
    """A rank: what it has done, and when the values that it needs next are there."""

    def __init__(self, microbatches: int, ahead: float) -> None:
        self.now, self.held, self.ahead = 0.0, 0.0, ahead
        self.forwards = self.inputs = self.weights = 0  # how many are done
        self.activations, self.gradients = ([NEVER] * (microbatches + 1) for _ in range(2))
        self.row: list[Action] = []


def scheduled(num_ranks: int, num_microbatches: int, cost: Cost, link: float, memory: Memory, policy: Policy) -> Rows:
    """Perform a step by a policy, event by event.

    A rank takes an I that is ready, or else an F that is ready, if memory and policy allow it, or else a W.

    Args:
        num_ranks: Number of pipeline ranks p; rank s holds stage s.
        num_microbatches: Number of microbatches m in a step.
        cost: How long an F, I or W lasts.
        link: Time from the end of a compute action to the arrival of its value on another rank, in the same unit.
        memory: What a rank may hold, at least one microbatch.
        policy: How ranks choose.

    Returns:
        The rows.
    """
    last = num_ranks - 1
    ranks = [_Rank(num_microbatches, policy.slope * (last - rank) + 1 + policy.extra) for rank in range(num_ranks)]
    ranks[0].activations[:-1] = [0.0] * num_microbatches
    free = [(0.0, rank) for rank in range(num_ranks)]
    heapify(free)
    while free:
        time, number = heappop(free)
        rank = ranks[number]
        if time < rank.now:
            continue  # it has been busy since
        op, later = _choice(rank, number, time, num_microbatches, cost, memory, policy)
        if op is None:
            if later < NEVER:
                heappush(free, (later, number))
            continue  # or else a value that arrives wakes it
        action = _perform(rank, number, op, time, cost, memory)
        heappush(free, (rank.now, number))
        other = number + (op is Op.F) - (op is Op.I)
        arrival, microbatch = rank.now + link, action.microbatch
        assert microbatch is not None
        if op is Op.F and number == last:
            rank.gradients[microbatch] = rank.now
        elif op is not Op.W and other >= 0:
            (ranks[other].activations if op is Op.F else ranks[other].gradients)[microbatch] = arrival
            heappush(free, (max(arrival, ranks[other].now), other))
    return [rank.row for rank in ranks]


Rows = list[list[Action]]


def _choice(
    rank: _Rank, number: int, time: float, num_microbatches: int, cost: Cost, memory: Memory, policy: Policy
) -> tuple[Op | None, float]:
    """Return what a rank does now; or None, and when it may do something."""
    gradient = rank.gradients[rank.inputs]
    activation = NEVER
    if rank.forwards - rank.inputs < rank.ahead and rank.held + 1 <= memory.most + _SAME:
        activation = rank.activations[rank.forwards]
    if gradient <= time:
        return Op.I, time
    if activation <= time:
        return Op.F, time
    later = min(gradient, activation)
    if rank.weights < rank.inputs:
        part = policy.fits if rank.forwards < num_microbatches else policy.tail
        if time + part * cost(Action(number, Op.W, rank.weights)) <= later:
            return Op.W, time
    return None, later


def _perform(rank: _Rank, number: int, op: Op, time: float, cost: Cost, memory: Memory) -> Action:
    if op is Op.F:
        microbatch, rank.forwards = rank.forwards, rank.forwards + 1
        rank.held += 1
    elif op is Op.I:
        microbatch, rank.inputs = rank.inputs, rank.inputs + 1
        rank.held -= 1 - memory.kept
    else:
        microbatch, rank.weights = rank.weights, rank.weights + 1
        rank.held -= memory.kept
    action = Action(number, op, microbatch)
    rank.row.append(action)
    rank.now = time + cost(action)
    return action
