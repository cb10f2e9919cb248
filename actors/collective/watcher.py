"""Ops that run while the host goes on: how they are waited for, and the thread that notices when one fails or hangs."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from raypar.actors.errors import first_line

_LOOK = 0.02  # seconds between two looks at the ops under way: how late a fault is noticed
_SHORTEST, _LONGEST = 20e-6, 1e-3  # seconds between two looks while the host is blocked


class Transfer(Protocol):
    """An op that the GPU was given."""

    def join(self) -> None:
        """Let torch's current stream wait for it; the host goes on."""

    def over(self) -> bool:
        """Whether the GPU is done with it; raises RuntimeError if it failed. Safe from any thread."""


@dataclass(eq=False)
class Issued:
    """A transfer under way; as a Finish it lets the current stream wait for it, and then do ``then``.

    keep         what must stay alive until the current stream waits, or the transfer is over
    on_device    the context in which to work with the GPU
    demand_open  raises RuntimeError if the group is closed: the transfer may then have ended halfway
    blocks       whether a wait blocks the host until the transfer is over
    op, peer     what it is, for messages
    deadline     of the latest wait, monotonic seconds; ``seconds`` is how long that was
    failed       why it failed; "" if it hasn't
    """

    transfer: Transfer
    then: Callable[[], object] | None
    keep: list[object]
    on_device: Callable[[], AbstractContextManager[object]]
    demand_open: Callable[[], None]
    blocks: bool = False
    op: str = ""
    peer: int | None = None
    deadline: float = math.inf
    seconds: float = math.inf
    failed: str = ""

    def __call__(self, timeout: float) -> None:
        """Wait. From now on the transfer has ``timeout`` seconds, with whatever the GPU has to do before it."""
        if self.failed:
            raise RuntimeError(self.failed)
        self.demand_open()
        deadline = time.monotonic() + timeout
        with self.on_device():
            if self.blocks:
                block_until_over(self.transfer, deadline, timeout, self.demand_open)
            else:
                self.seconds, self.deadline = timeout, deadline
            self.transfer.join()
            if self.then is not None:
                self.then()
        self.keep.clear()


class Watcher:
    """Looks after the ops of one group. ``fault`` is called with op, peer and reason of the first that goes wrong."""

    def __init__(self, fault: Callable[[str, int | None, str], object]) -> None:
        self._fault = fault
        self._issued: list[Issued] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def add(self, issued: Issued) -> None:
        """Watch an op until it is over."""
        with self._changed:
            self._issued.append(issued)
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._watch, name="raypar watcher", daemon=True)
                self._thread.start()
            self._changed.notify()

    def pending(self) -> list[Issued]:
        """The ops that were not over when last looked at, oldest first."""
        with self._changed:
            return list(self._issued)

    def stop(self) -> None:
        """Watch no more. Safe from any thread, the watcher's own too."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def forget(self) -> None:
        """Let go of every op: the GPU has ended them all."""
        for issued in self.pending():
            issued.keep.clear()
        with self._changed:
            self._issued.clear()

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._issued and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
            for issued in self.pending():
                issued.failed = self._look(issued)
                if issued.failed:
                    self._fault(issued.op, issued.peer, issued.failed)
                    return
            time.sleep(_LOOK)

    def _look(self, issued: Issued) -> str:
        """Why an op failed, "" if it hasn't; one that is over is forgotten."""
        try:
            over = issued.transfer.over()
        except RuntimeError as error:
            return first_line(error)
        if not over:
            return _late(issued.seconds) if time.monotonic() > issued.deadline else ""
        issued.keep.clear()
        with self._changed:
            if issued in self._issued:
                self._issued.remove(issued)
        return ""


def block_until_over(transfer: Transfer, deadline: float, seconds: float, demand_open: Callable[[], None]) -> None:
    """Block the host until a transfer is over; raises TimeoutError at its deadline, RuntimeError if it failed."""
    pause = _SHORTEST
    try:
        while not transfer.over():
            demand_open()
            if time.monotonic() > deadline:
                raise TimeoutError(_late(seconds))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
    finally:
        demand_open()  # what was aborted ends too, or fails for no reason of its own


def _late(seconds: float) -> str:
    return f"nothing came within {seconds:g} s"
