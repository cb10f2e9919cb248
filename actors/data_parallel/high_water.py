"""How much memory of a kind is held, and how much was held at the most."""

from __future__ import annotations


class HighWater:
    """Bytes that are held now, and the most since a step began.

    Attributes:
        now: Bytes that are held now.
        most: The most bytes that were held since ``begin``.
    """

    def __init__(self) -> None:
        self.now = self.most = 0

    def begin(self) -> None:
        """Begin a step, with what is held now."""
        self.most = self.now

    def add(self, change: int) -> None:
        """Count bytes that are allocated, or freed if ``change`` is negative."""
        self.now += change
        self.most = max(self.most, self.now)
