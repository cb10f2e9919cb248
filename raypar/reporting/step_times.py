"""The times of the steps that were taken, which a failure may have cost."""

from __future__ import annotations

import time
from array import array

from raypar.schedules.float_sum import float_sum


class StepTimes:
    """Keeps how long each step took, to know what it costs to take it again."""

    def __init__(self) -> None:
        self._steps, self._seconds = array("q"), array("d")

    def keep(self, step: int, seconds: float) -> None:
        """Note that a step, counted from 0, was taken."""
        self._steps.append(step)
        self._seconds.append(seconds)

    def lost(self, start: float, back_to: int) -> float:
        """Return the seconds that a failure has cost until now.

        Args:
            start: When the work that failed was begun, in seconds of time.perf_counter.
            back_to: Number of steps taken that the run goes on after; later ones are taken again.
        """
        again = (seconds for step, seconds in zip(self._steps, self._seconds, strict=True) if step >= back_to)
        return time.perf_counter() - start + float_sum(again)

    def go_back(self, back_to: int) -> None:
        """Forget the steps that are taken again."""
        while self._steps and self._steps[-1] >= back_to:
            self._steps.pop()
            self._seconds.pop()
