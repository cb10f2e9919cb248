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
        self._entries: dict[tuple[str, str], Entry] = {}
        self._lock = threading.Lock()

    def record(self, axis: str, op: str, nbytes: int) -> None:
        with self._lock:
            self._entries[axis, op] = self._entries.get((axis, op), Entry()) + Entry(1, nbytes)

    def entries(self) -> dict[tuple[str, str], Entry]:
        """A copy of the counts so far."""
        with self._lock:
            return dict(self._entries)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


def total(ledgers: Mapping[str, Mapping[tuple[str, str], Entry]]) -> dict[tuple[str, str], Entry]:
    """The counts of several members, added up."""
    out: dict[tuple[str, str], Entry] = {}
    for entries in ledgers.values():
        for key, entry in entries.items():
            out[key] = out.get(key, Entry()) + entry
    return out
