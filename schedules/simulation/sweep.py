"""One pass over a schedule in an order that its dependencies allow.

In each round every rank that can perform its next action does so, so that a round is one time slot if all actions last
equally long. Any other rank waits for one thing, which wakes it. So the work is linear in the number of
actions, and only the values under way are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raypar.schedules.action import RECVS, SENDS, Action, Op
from raypar.schedules.known_rules import KnownEdges, KnownRule
from raypar.schedules.rules import awaited, leaving, partner, rank_of
from raypar.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True, order=True)
class Wait:
    """A rank that can't go on.

    Attributes:
        rank: The rank.
        index: The position in its row where it stopped.
        action: The action at that position.
        peer: The rank that it waits for.
        reason: What it waits for, in words.
    """

    rank: int
    index: int
    action: Action
    peer: int
    reason: str


class Sweep:
    """An iterator over ``(rank, index, action)`` in a causal order; then ``waits`` lists the ranks that are stuck.

    Only dependencies between ranks are considered; ``check`` covers the order within a row.

    Args:
        schedule: The schedule, lowered or not.
        send_capacity: Number of values that may be under way from one rank to another before the next SEND blocks. None
            for no limit; 0 for a SEND that blocks until its RECV is reached (a rendezvous).
    """

    def __init__(self, schedule: Schedule, send_capacity: int | None = None) -> None:
        self._schedule = schedule
        self._capacity = send_capacity
        self._positions = [0] * schedule.num_ranks
        self._awaited: list[Sequence[Action]] = [()] * schedule.num_ranks
        self._awaited_by, self._left_by = KnownRule(awaited, schedule), KnownRule(leaving, schedule)
        self._edge = KnownEdges(schedule)
        self._there: set[Action] = set()
        self._under_way: dict[tuple[int, int], int] = {}
        # The rank that waits, by what it waits for: a value, a RECV, or a free slot between two ranks.
        self._waiting: dict[Action | tuple[int, int], int] = {}

    def __iter__(self) -> Iterator[tuple[int, int, Action]]:
        rows, positions = self._schedule.rows, self._positions
        lengths = [len(row) for row in rows]
        ready: list[int] = []
        for rank, length in enumerate(lengths):
            if length:
                self._reach(rank, rows[rank][0], ready)
        while ready:
            awake: list[int] = []
            for rank in ready:
                row, index = rows[rank], positions[rank]
                yield rank, index, row[index]
                self._perform(rank, row[index], awake)
                positions[rank] = index = index + 1
                if index < lengths[rank]:
                    self._reach(rank, row[index], awake)
            ready = awake

    def waits(self) -> list[Wait]:
        """Return the ranks that did not reach the end of their rows. Call it after the iteration."""
        found = []
        for key, rank in self._waiting.items():
            index = self._positions[rank]
            action = self._schedule.rows[rank][index]
            if not isinstance(key, Action):
                peer, reason = key[1], f"{self._schedule.label(key[1])} to receive an earlier value"
            else:
                peer = rank_of(key, self._schedule)
                whole = key._replace(op=Op.B, peer=None)
                made = key if key.op in SENDS or key.op in RECVS else key._replace(peer=None)
                written = whole if key.op is Op.I and whole in self._schedule.rows[peer] else made
                there = self._schedule.label(peer)
                reason = f"{there} to reach {key}" if key.op in RECVS else f"{written} of {there}"
            found.append(Wait(rank, index, action, peer, reason))
        return sorted(found)

    def _reach(self, rank: int, action: Action, awake: list[int]) -> None:
        """Put a rank on ``awake`` if its next action is ready; otherwise record what it waits for."""
        key = self._missing(rank, action)
        if key is None:
            awake.append(rank)
            return
        self._waiting[key] = rank
        if self._capacity == 0 and action.op in RECVS:
            sender = self._waiting.pop(action, None)
            if sender is not None:
                awake.append(sender)

    def _missing(self, rank: int, action: Action) -> Action | tuple[int, int] | None:
        """Return what an action still waits for, or None if it is ready."""
        self._awaited[rank] = wanted = self._awaited_by(action)
        if action.op in SENDS:
            if self._capacity is None:
                return None
            if self._capacity == 0:
                return None if action in self._waiting else partner(action)
            edge = self._edge(action)
            return edge if self._under_way.get(edge, 0) >= self._capacity else None
        return next((need for need in wanted if need not in self._there), None)

    def _perform(self, rank: int, action: Action, awake: list[int]) -> None:
        """Record the values that an action provides and takes, and wake the ranks that waited for them."""
        there, waiting = self._there, self._waiting
        there.difference_update(self._awaited[rank])
        for value in self._left_by(action):
            there.add(value)
            if value in waiting:
                other = waiting.pop(value)
                self._reach(other, self._schedule.rows[other][self._positions[other]], awake)
        if self._capacity:
            if action.op in SENDS:
                edge = self._edge(action)
                self._under_way[edge] = self._under_way.get(edge, 0) + 1
            elif action.op in RECVS:
                edge = self._edge(action)
                self._under_way[edge] -= 1
                if edge in waiting:
                    awake.append(waiting.pop(edge))
