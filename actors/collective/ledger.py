"""The ledger: calls, bytes and seconds of communication, counted by mesh axis and op."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


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
    """Counts by (axis, op). A worker has one, which its groups share; it is thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._seconds: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def record(self, axis: str, op: str, nbytes: int) -> None:
        """Count one call of an op and its payload bytes."""
        with self._lock:
            counts = self._counts.setdefault((axis, op), [0, 0])
            counts[0] += 1
            counts[1] += nbytes

    def spent(self, axis: str, op: str, seconds: float) -> None:
        """Add to the seconds spent in an op."""
        with self._lock:
            self._seconds[axis, op] = self._seconds.get((axis, op), 0.0) + seconds

    def entries(self) -> dict[tuple[str, str], LedgerEntry]:
        """Return a copy of the counts so far."""
        with self._lock:
            return {
                key: LedgerEntry(calls, nbytes, self._seconds.get(key, 0.0))
                for key, (calls, nbytes) in self._counts.items()
            }
