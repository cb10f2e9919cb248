"""What the groups moved: calls, bytes and seconds by axis and op."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """How often an op was called, and the payload bytes this member sent by it (for ``recv``: received).

    seconds  that the caller spent in starting it and in waiting for it, for members that came late too; on GPUs the
             host's. Entries are equal whatever time they took.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = field(default=0.0, compare=False)


class Ledger:
    """Counts by (axis, op); one per worker, shared by its groups and safe to use from several threads."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._seconds: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def record(self, axis: str, op: str, nbytes: int) -> None:
        with self._lock:
            counts = self._counts.setdefault((axis, op), [0, 0])
            counts[0] += 1
            counts[1] += nbytes

    def spent(self, axis: str, op: str, seconds: float) -> None:
        """Add to the seconds of an op."""
        with self._lock:
            self._seconds[axis, op] = self._seconds.get((axis, op), 0.0) + seconds

    def entries(self) -> dict[tuple[str, str], Entry]:
        """A copy of the counts so far."""
        with self._lock:
            return {
                key: Entry(calls, nbytes, self._seconds.get(key, 0.0)) for key, (calls, nbytes) in self._counts.items()
            }
