"""The present and the largest number of bytes of one kind of memory."""

from __future__ import annotations


class HighWater:
    """Bytes that are allocated now, and the most since a step began (the high-water mark).

    Attributes:
        now: Bytes that are allocated now.
        most: The most bytes that were allocated since ``begin``.
    """

    def __init__(self) -> None:
        self.now = self.most = 0

    def begin(self) -> None:
        """Begin a step: reset ``most`` to the present bytes."""
        self.most = self.now

    def add(self, change: int) -> None:
        """Count bytes that are allocated, or freed if ``change`` is negative."""
        self.now += change
        self.most = max(self.most, self.now)
