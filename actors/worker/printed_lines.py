"""What the user's code prints on an actor, kept for the driver."""

from __future__ import annotations

import threading
from typing import Any, TextIO

_MOST = 200  # lines that are kept until somebody takes them
_LONGEST = 2000  # characters of a line


class PrintedLines:
    """A standard output that keeps its lines, and writes all to another one.

    Args:
        through: The other one.
    """

    def __init__(self, through: TextIO) -> None:
        self._through, self._lock = through, threading.Lock()
        self._lines, self._begun, self._dropped = list[str](), "", 0

    def write(self, text: str) -> int:
        """Write a text, and keep the lines that it ends."""
        with self._lock:
            *ended, begun = (self._begun + text).split("\n")
            self._begun = begun[:_LONGEST]
            room = _MOST - len(self._lines)
            self._lines += [line[:_LONGEST] for line in ended[:room]]
            self._dropped += max(0, len(ended) - room)
        return self._through.write(text)

    def take(self) -> tuple[str, ...]:
        """Return the lines that were printed since the last call, and say how many more there were."""
        if not self._lines:
            return ()
        with self._lock:
            lines, dropped = self._lines, self._dropped
            self._lines, self._dropped = [], 0
        more = [f"(and {dropped:,} more lines, which are in Ray's log of the actor)"] if dropped else []
        return (*lines, *more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._through, name)
