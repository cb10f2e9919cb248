"""What the groups moved: calls and bytes by axis and op."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """How often an op was called, and the payload bytes this member sent by it (for ``recv``: received)."""

    calls: int = 0
    bytes: int = 0


class Ledger:
    """Counts by (axis, op); one per worker, shared by its groups and safe to use from several threads."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._lock = threading.Lock()

    def record(self, axis: str, op: str, nbytes: int) -> None:
        with self._lock:
            counts = self._counts.setdefault((axis, op), [0, 0])
            counts[0] += 1
            counts[1] += nbytes

    def entries(self) -> dict[tuple[str, str], Entry]:
        """A copy of the counts so far."""
        with self._lock:
            return {key: Entry(calls, nbytes) for key, (calls, nbytes) in self._counts.items()}
