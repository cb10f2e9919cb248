"""What the groups moved: calls and bytes by axis and op."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """How often an op was called, and the payload bytes this member sent by it (for ``recv``: received)."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: Entry) -> Entry:
        return Entry(self.calls + other.calls, self.bytes + other.bytes)


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

    def clear(self) -> None:
        with self._lock:
            self._counts.clear()


def total(ledgers: Mapping[str, Mapping[tuple[str, str], Entry]]) -> dict[tuple[str, str], Entry]:
    """The counts of several members, added up."""
    out: dict[tuple[str, str], Entry] = {}
    for entries in ledgers.values():
        for key, entry in entries.items():
            out[key] = out.get(key, Entry()) + entry
    return out
