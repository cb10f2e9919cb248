"""The answers to calls that are under way, and progress queries to actors that are late."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from heapq import nsmallest
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from raypar.actors.specs.results import Progress
from raypar.cluster.calls.deadline import SILENT
from raypar.schedules.action import Action

LOOK = 0.25  # seconds between two checks of the actors that have not answered
_QUERIES = 200  # a second, to all actors together: each costs the driver some 0.2 ms
_BURST = 50  # queries that may be sent at once


class Answer(NamedTuple):
    """The result or the exception of a call.

    Attributes:
        ref: The object ref of the call.
        rank: The rank that was called.
        value: The result; None if the call raised.
        error: The exception; None if the call returned.
    """

    ref: Any
    rank: int
    value: Any
    error: Exception | None


class Answers:
    """The answers to calls; each is taken once, in the order of arrival.

    Ray reports each answer as it arrives, so the cost of waiting is linear in the number of calls: no call is polled
    while it is under way. The methods are for one thread.

    Args:
        refs: The object refs of calls, with the ranks that were called.

    Attributes:
        late: By rank, the number of its calls that are under way; ranks without any are not in it.
    """

    def __init__(self, refs: Iterable[tuple[Any, int]] = ()) -> None:
        self.late: dict[int, int] = {}
        self._pending: dict[Any, int] = {}
        self._arrived: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        for ref, rank in refs:
            self.expect(ref, rank)

    def expect(self, ref: Any, rank: int) -> None:
        """Await the answer of a call to a rank, unless it is awaited already."""
        if ref not in self._pending:
            self._pending[ref] = rank
            self.late[rank] = self.late.get(rank, 0) + 1
            ref.future().add_done_callback(partial(_arrive, self._arrived, ref))

    def take(self, seconds: float) -> list[Answer]:
        """Return all answers that have arrived; if there are none, wait for the next ones.

        Args:
            seconds: Most seconds to wait.
        """
        found = list[Answer]()
        try:
            while self._pending:
                ref, future = self._arrived.get(timeout=0.0 if found else max(0.0, seconds))
                found.append(self._taken(ref, future))
        except Empty:
            pass
        return found

    def take_within(self, seconds: float) -> dict[int, Answer]:
        """Wait for all answers until none has arrived for ``seconds``; return the answers by rank.

        The limit is not for all together: this process needs seconds merely to take thousands of answers.
        """
        found: dict[int, Answer] = {}
        while more := self.take(seconds):
            found |= {answer.rank: answer for answer in more}
        return found

    def _taken(self, ref: Any, future: Any) -> Answer:
        rank = self._pending.pop(ref)
        self.late[rank] -= 1
        if not self.late[rank]:
            del self.late[rank]
        error = future.exception()
        return Answer(ref, rank, None if error else future.result(), error)


def _arrive(arrived: SimpleQueue[tuple[Any, Any]], ref: Any, future: Any) -> None:
    arrived.put((ref, future))


class ProgressWatch:
    """Queries late actors for their progress, and finds which of them are silent or stay in one action.

    The number of queries a second to all actors together is bounded, so each of thousands of late actors is queried
    every few seconds. Conclusions about an actor depend only on its answers and on its unanswered queries.

    Args:
        ask: Queries the progress of a rank; returns the object ref of the call.
    """

    def __init__(self, ask: Callable[[int], Any]) -> None:
        self._ask = ask
        self._queries = Answers()
        self._asked: dict[int, float] = {}  # by rank, when its latest query was sent, in time.monotonic
        self._heard: dict[int, float] = {}  # by rank, when its latest answer came
        self._moved: dict[int, float] = {}  # by rank, when it was first seen in its present action, or idle
        self._done: dict[int, tuple[int, int]] = {}
        self._action: dict[int, Action | None] = {}
        self._looked = time.monotonic() - LOOK
        self._allowed = float(_BURST)

    def listen(self, late: Iterable[int]) -> bool:
        """Record the answers of actors, and query some late ones, first those whose last query is the oldest.

        Args:
            late: The ranks that are late.

        Returns:
            Whether it has done so, which happens every ``LOOK`` seconds.
        """
        now = time.monotonic()
        if now - self._looked < LOOK:
            return False
        self._allowed = min(_BURST, self._allowed + (now - self._looked) * _QUERIES)
        self._looked = now
        for answer in self._queries.take(0.0):
            self._hear(answer.rank, answer.value, now)
        due = (rank for rank in late if rank not in self._queries.late and now - self._asked.get(rank, 0.0) >= LOOK)
        for rank in nsmallest(int(self._allowed), due, key=lambda rank: self._asked.get(rank, 0.0)):
            self._asked[rank] = now
            self._queries.expect(self._ask(rank), rank)
            self._allowed -= 1.0
        return True

    def silence(self, rank: int) -> float:
        """Return the seconds for which a query to an actor is unanswered."""
        return time.monotonic() - self._asked[rank] if rank in self._queries.late else 0.0

    def stay(self, rank: int) -> tuple[float, Action | None]:
        """Return the seconds for which an actor has been in one action, and that action; None between two actions.

        For an actor that answers the time ends at its last answer, for a silent one now.
        """
        if rank not in self._asked:
            return 0.0, None
        seen = time.monotonic() if self.silence(rank) > SILENT else self._heard.get(rank, self._asked[rank])
        return seen - self._moved.get(rank, self._asked[rank]), self._action.get(rank)

    def _hear(self, rank: int, progress: Progress | None, now: float) -> None:
        """Record an answer, or None for an error, at a time of time.monotonic."""
        self._heard[rank] = now
        if progress is None:
            return
        done = progress.step, progress.done
        if progress.idle or rank not in self._done or done > self._done[rank]:  # one that goes back and forth is stuck
            self._done[rank], self._moved[rank] = done, now
        self._action[rank] = progress.action
