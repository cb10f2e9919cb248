"""The ledger: calls, bytes and seconds of communication, counted by mesh axis and op."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from raypar.schedules.timeline import Call

_MOST_CALLS = 1 << 16  # of which the times are kept until someone takes them


@dataclass(frozen=True)
class LedgerEntry:
    """Counts of one op on one axis. Two entries are equal if their calls and bytes are, whatever time they took.

    Attributes:
        calls: How often the op was called.
        bytes: Payload bytes that this member sent; for ``recv``, received.
        seconds: Time that the caller spent in starting the op and in waiting for it, including waits for late members.
            On GPUs it is the host's time.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = field(default=0.0, compare=False)


class Ledger:
    """Counts by (axis, op), and the times of the latest calls. Thread-safe: the groups of a worker share one."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque(maxlen=_MOST_CALLS)
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._seconds: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()
        self._every: str | None = None  # what replaces every axis

    @contextmanager
    def counting_as(self, axis: str) -> Iterator[None]:
        """Return a context in which all ops count on one axis, whatever groups they are of."""
        self._every = axis
        try:
            yield
        finally:
            self._every = None

    def record(self, axis: str, op: str, nbytes: int) -> None:
        """Count one call of an op and its payload bytes."""
        axis = self._every or axis
        with self._lock:
            counts = self._counts.setdefault((axis, op), [0, 0])
            counts[0] += 1
            counts[1] += nbytes

    def spent(self, axis: str, op: str, begin: float, end: float) -> None:
        """Add the time that the caller spent in an op.

        Args:
            axis: Mesh axis.
            op: Name of the op.
            begin: When it began, in seconds of ``time.perf_counter``.
            end: When it was over.
        """
        axis = self._every or axis
        call = Call(f"{axis} {op}", begin, end)
        with self._lock:
            self._seconds[axis, op] = self._seconds.get((axis, op), 0.0) + (end - begin)
            self._calls.append(call)

    def taken(self, since: float) -> tuple[Call, ...]:
        """Return the calls that began at a time or later, in their order, and forget all calls so far."""
        with self._lock:
            calls = tuple(call for call in self._calls if call.start >= since) if self._calls else ()
            self._calls.clear()
        return calls

    def entries(self) -> dict[tuple[str, str], LedgerEntry]:
        """Return a copy of the counts so far."""
        with self._lock:
            return {
                key: LedgerEntry(calls, nbytes, self._seconds.get(key, 0.0))
                for key, (calls, nbytes) in self._counts.items()
            }
