"""Work beside the steps that takes a core only where nothing else wants it, as long as it has time for that."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator


def exhaust(work: Iterator[object], spare: float) -> None:
    """Do ``work``, a piece with each ``next``: for ``spare`` seconds only where a core is free, then like other work.

    With 0 seconds, and where no thread can give way (Linux's SCHED_IDLE can), it is other work from the start. Raises
    what the work raises. A piece should take long beside what Python does between two, and let the GIL go meanwhile:
    who waits for the GIL waits for a thread that gives way to everybody.
    """
    if spare > 0 and sys.platform.startswith("linux"):
        thread = _Spare(work)
        thread.start()
        thread.join(spare)
        thread.late.set()
        thread.join()
        if thread.error is not None:
            raise thread.error
    deque(work, maxlen=0)


class _Spare(threading.Thread):
    """Does pieces of work until it is ``late``. There is no way back from SCHED_IDLE, so it is a thread of its own."""

    def __init__(self, work: Iterator[object]) -> None:
        super().__init__(name="raypar-spare", daemon=True)
        self._work = work
        self.late = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        except OSError:
            return
        try:
            while not self.late.is_set() and next(self._work, self) is not self:
                pass
        except BaseException as error:
            self.error = error
