"""A thread of a group that performs ops in several steps, such as those that go piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from raypar.actors.collective.group import Finish


class OpThread:
    """A thread that performs ops one after the other, so that they go on while the actor computes.

    Args:
        name: Name of the group, for the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._tasks = SimpleQueue[tuple[Callable[[], None], Future[None]] | None]()
        self._thread = threading.Thread(target=self._run, name=f"group {name}", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> Finish:
        """Queue an op, which ``work`` performs, and return the function that waits for it."""
        done = Future[None]()
        self._tasks.put((work, done))
        return done.result

    def end(self) -> None:
        """End the thread after the ops that are queued, which fail at once if their groups are closed."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            work, done = task
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)
