"""Lines that the user's code prints on an actor, stored for the driver."""

from __future__ import annotations

import threading
from typing import Any, TextIO

_MOST = 200  # lines that are stored until the driver takes them
_LONGEST = 2000  # characters of a line


class PrintedLines:
    """A standard output that stores its lines, and writes everything to another one.

    Args:
        through: The other one.
    """

    def __init__(self, through: TextIO) -> None:
        self._through, self._lock = through, threading.Lock()
        self._lines, self._begun, self._dropped = list[str](), "", 0

    def write(self, text: str) -> int:
        """Write a text, and store the lines that it completes."""
        with self._lock:
            *ended, begun = (self._begun + text).split("\n")
            self._begun = begun[:_LONGEST]
            free = _MOST - len(self._lines)
            self._lines += [line[:_LONGEST] for line in ended[:free]]
            self._dropped += max(0, len(ended) - free)
        return self._through.write(text)

    def take(self) -> tuple[str, ...]:
        """Return the lines that were printed since the last call, and the number of those that were dropped."""
        if not self._lines:
            return ()
        with self._lock:
            lines, dropped = self._lines, self._dropped
            self._lines, self._dropped = [], 0
        more = [f"(and {dropped:,} more lines, which are in Ray's log of the actor)"] if dropped else []
        return (*lines, *more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._through, name)
