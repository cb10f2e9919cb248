"""Training steps that were handed to the actors and have not been reported yet."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from raypar.actors.errors import NonFiniteError
from raypar.cluster.calls import Calls


class Ahead:
    """Hands steps to the actors before the one they work on has been reported, so that they never wait for the driver.

    most   steps that may be handed over beyond the one that is waited for
    epoch  how many steps could not be made by now: actors refuse a call of an earlier one
    """

    def __init__(self, calls: Calls, most: int, epoch: int) -> None:
        self._calls, self._most, self._epoch = calls, most, epoch
        self._handed: deque[tuple[int, list[Any]]] = deque()
        self._since = time.perf_counter()

    def hand_over(self, first: int, stop: int) -> None:
        """Hand over the steps from ``first`` (the one to be reported next) on, but not step ``stop``."""
        if not self._handed:
            self._since = time.perf_counter()
        for number in range(first + len(self._handed), min(stop, first + self._most + 1)):
            self._handed.append((number, self._calls.submit("run", "train", number, self._epoch)))

    def collect(self) -> tuple[list[Any], float]:
        """The results of the oldest step, and the seconds since the one before it (or since it was handed over).

        They are no less than an actor took: the driver may have come late to the one before.

        Raises what Calls.gather raises. After a NonFiniteError nothing is left: the actors refuse what came behind.
        """
        number, refs = self._handed.popleft()
        try:
            results = self._calls.gather(refs, f"step {number}")
        except NonFiniteError:
            while self._handed:
                self._calls.drop(self._handed.popleft()[1])
            raise
        before, self._since = self._since, time.perf_counter()
        return results, max([self._since - before, *[result.span for result in results]])

    def __len__(self) -> int:
        return len(self._handed)
