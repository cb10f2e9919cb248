"""The critical path of rows, which determines the length of a step, and the W on it that can come later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raypar.schedules.action import Action, Op
from raypar.schedules.generators.list_scheduling import Cost, RankMemory, Rows

_ROUNDING = 1e-9  # of a length


@dataclass(frozen=True, slots=True)
class Timed:
    """Rows with the time of every action.

    Attributes:
        rows: The rows.
        placement: The rank of each stage.
        ends: When each action ends.
        spans: Time of each rank from its first start to its last end.
        before: For each action, the one that it waited for; None for one that starts at once.
    """

    rows: Rows
    placement: Sequence[int]
    ends: dict[Action, float]
    spans: list[float]
    before: dict[Action, Action | None]

    @property
    def makespan(self) -> float:
        """When the last rank is done."""
        return max(self.ends[row[-1]] for row in self.rows)

    def length(self, *, flush: bool) -> float:
        """Return the length to minimize: the makespan, or without ``flush`` the longest span of a rank."""
        return self.makespan if flush else max(self.spans)


def action_ends(rows: Rows, placement: Sequence[int], cost: Cost, link: float) -> Timed:
    """Compute when each action of rows ends, if each starts as early as possible.

    Args:
        rows: Rows of F, B, I and W, free of deadlock.
        placement: The rank of each stage.
        cost: How long an action lasts.
        link: Time from the end of an action to the arrival of its value on another rank, in the same unit.
    """
    ends: dict[Action, float] = {}
    before: dict[Action, Action | None] = {}
    positions, now, starts = [0] * len(rows), [0.0] * len(rows), [0.0] * len(rows)
    ready = list(range(len(rows)))
    while ready:
        number = ready.pop()
        row = rows[number]
        while positions[number] < len(row):
            action = row[positions[number]]
            need = _need(action, len(placement) - 1, ends)
            if need is not None and need not in ends:
                break
            start, cause = now[number], row[positions[number] - 1] if positions[number] else None
            if need is not None and need.stage is not None and placement[need.stage] != number:
                arrival = ends[need] + link
                if arrival > start:
                    start, cause = arrival, need
            if not positions[number]:
                starts[number] = start
            before[action] = cause
            ends[action] = now[number] = start + cost(action)
            positions[number] += 1
            if action.op is not Op.W and action.stage is not None:
                other = action.stage + (1 if action.op is Op.F else -1)
                if 0 <= other < len(placement):
                    ready.append(placement[other])
    return Timed(rows, placement, ends, [end - start for end, start in zip(now, starts, strict=True)], before)


def _need(action: Action, last: int, ends: dict[Action, float]) -> Action | None:
    """Return the action that an action waits for; None for the forwards of the first stage."""
    stage, op, microbatch, _ = action
    assert stage is not None
    if op is Op.F:
        return Action(stage - 1, Op.F, microbatch) if stage else None
    if op is Op.W:
        return Action(stage, Op.I, microbatch)
    if stage == last:
        return Action(stage, Op.F, microbatch)
    whole = Action(stage + 1, Op.B, microbatch)
    return whole if whole in ends else Action(stage + 1, Op.I, microbatch)


def postpone_weight_gradients(
    found: Timed, cost: Cost, link: float, memory: RankMemory, *, flush: bool, budget: int
) -> Timed:
    """Move W off the critical path, one after the other, as long as that makes the step no longer.

    Where several paths are equally long, one move alone does not shorten the step. A W only moves towards the end of
    its row, so that the search ends.

    Args:
        found: The rows and their times.
        cost: How long an action lasts.
        link: The link between ranks, in the same unit.
        memory: What a rank may hold.
        flush: Whether all ranks end together; see ``Timed.length``.
        budget: Number of actions that may be timed.

    Returns:
        Shorter rows, or those found.
    """
    refused: set[tuple[int, tuple[Action, ...]]] = set()
    first, left = found, budget
    moved = True
    while moved:
        moved = False
        for number, row in _later_weights(found, flush=flush):
            if left < 0:
                break
            if (number, tuple(row)) in refused or not memory.allows(row):
                continue
            left -= sum(map(len, found.rows))
            other = action_ends([*found.rows[:number], row, *found.rows[number + 1 :]], found.placement, cost, link)
            if other.length(flush=flush) <= found.length(flush=flush) * (1 + _ROUNDING):
                found, moved = other, True
                break
            refused.add((number, tuple(row)))
    is_shorter = found.length(flush=flush) < first.length(flush=flush) * (1 - _ROUNDING)
    return found if is_shorter else first


def _later_weights(found: Timed, *, flush: bool) -> Iterator[tuple[int, list[Action]]]:
    """Yield rows in which a W of the critical path comes after the action that waits for it, from the end back."""
    lengths = [found.ends[row[-1]] for row in found.rows] if flush else found.spans
    number = lengths.index(max(lengths))
    later = found.rows[number][-1]
    while (action := found.before[later]) is not None:
        if action.op is Op.W and later.op is not Op.W:
            rank = found.placement[later.stage or 0]
            row = found.rows[rank]
            at = row.index(later)
            yield rank, [*row[: at - 1], later, action, *row[at + 1 :]]
        later = action
