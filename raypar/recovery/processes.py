"""The processes of a job's actors on this node, which can be ended at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress


class Processes:
    """Ends processes of actors on this node without their help: one that is stopped would not end for seconds.

    It knows them by descriptors and not by their numbers, which another process may have got meanwhile.
    """

    def __init__(self) -> None:
        self._opened = dict[int, int]()  # by rank, a descriptor of the process

    def know(self, numbers: Mapping[int, int]) -> None:
        """Know these processes from now on, and no others, by their ranks."""
        self.close()
        for rank, number in numbers.items():
            with suppress(OSError):  # it has just died
                self._opened[rank] = os.pidfd_open(number)

    def kill(self, rank: int) -> None:
        """End the process of an actor, if it is known, and know it no more."""
        fd = self._opened.pop(rank, None)
        if fd is not None:
            with suppress(OSError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)

    def close(self) -> None:
        """Know no process any more."""
        while self._opened:
            os.close(self._opened.popitem()[1])
