"""One pass over a schedule in an order that its dependencies allow.

Every rank has a place in its row. In each round every rank that can perform its next action does, so a round is
one time slot in which all actions last equally long. A rank that cannot go on waits for one thing and is woken by
it: the work is linear in the number of actions, and only values under way are remembered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from raypar.schedules.action import RECVS, SENDS, Action, Op
from raypar.schedules.rules import awaited, partner, provides, rank_of, travels
from raypar.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True, order=True)
class Wait:
    """A rank that cannot go on: at which place of its row, with which action, for which rank, and for what."""

    rank: int
    index: int
    action: Action
    peer: int
    reason: str


class Sweep:
    """Iterate to get ``(rank, index, action)``; afterwards ``waits`` tells who could not finish, and why.

    Only waiting between ranks is looked at: the order within a row is ``check``'s business.

    ``send_capacity`` is the number of values that may be under way from one rank to another before the next SEND
    blocks: None for no limit, 0 for a SEND that blocks until its RECV is reached (a rendezvous).
    """

    def __init__(self, schedule: Schedule, send_capacity: int | None = None) -> None:
        self._schedule = schedule
        self._capacity = send_capacity
        self._places = [0] * schedule.num_ranks
        self._awaited: list[Action | None] = [None] * schedule.num_ranks
        self._there: set[Action] = set()
        self._under_way: dict[tuple[int, int], int] = {}
        # What is waited for: a value, a RECV that has to be reached, or room between two ranks; and who waits.
        self._waiting: dict[Action | tuple[int, int], int] = {}

    def __iter__(self) -> Iterator[tuple[int, int, Action]]:
        rows, places = self._schedule.rows, self._places
        lengths = [len(row) for row in rows]
        ready: list[int] = []
        for rank, length in enumerate(lengths):
            if length:
                self._reach(rank, rows[rank][0], ready)
        while ready:
            awake: list[int] = []
            for rank in ready:
                row, index = rows[rank], places[rank]
                yield rank, index, row[index]
                self._perform(rank, row[index], awake)
                places[rank] = index = index + 1
                if index < lengths[rank]:
                    self._reach(rank, row[index], awake)
            ready = awake

    def waits(self) -> list[Wait]:
        """Every rank that did not come to the end of its row, once the iteration is over."""
        found = []
        for key, rank in self._waiting.items():
            index = self._places[rank]
            action = self._schedule.rows[rank][index]
            if not isinstance(key, Action):
                peer, reason = key[1], f"rank {key[1]} to receive an earlier value"
            else:
                peer = rank_of(key, self._schedule)
                whole = key._replace(op=Op.B)
                written = whole if key.op is Op.I and whole in self._schedule.rows[peer] else key
                reason = f"rank {peer} to reach {key}" if key.op in RECVS else f"{written} of rank {peer}"
            found.append(Wait(rank, index, action, peer, reason))
        return sorted(found)

    def _reach(self, rank: int, action: Action, awake: list[int]) -> None:
        """A rank comes to an action: it is ready, or it waits."""
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
        self._awaited[rank] = need = awaited(action, self._schedule)
        if action.op in SENDS:
            if self._capacity is None:
                return None
            if self._capacity == 0:
                return None if action in self._waiting else partner(action)
            edge = self._edge(action)
            return edge if self._under_way.get(edge, 0) >= self._capacity else None
        return None if need in self._there else need

    def _perform(self, rank: int, action: Action, awake: list[int]) -> None:
        schedule, there, waiting = self._schedule, self._there, self._waiting
        need = self._awaited[rank]
        if need is not None:
            there.discard(need)
        for value in provides(action):
            if travels(value, schedule):
                there.add(value)
                if value in waiting:
                    awake.append(waiting.pop(value))
        if self._capacity:
            if action.op in SENDS:
                edge = self._edge(action)
                self._under_way[edge] = self._under_way.get(edge, 0) + 1
            elif action.op in RECVS:
                edge = self._edge(partner(action))
                self._under_way[edge] -= 1
                if edge in waiting:
                    awake.append(waiting.pop(edge))

    def _edge(self, send: Action) -> tuple[int, int]:
        return rank_of(send, self._schedule), rank_of(partner(send), self._schedule)
