"""GPU ops in progress: waiting for them, and a thread that detects when one fails or misses its deadline."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from raypar.actors.errors import first_line

_LOOK = 0.02  # seconds between two checks of the ops in progress: the latest notice of a fault
_SHORTEST, _LONGEST = 20e-6, 1e-3  # seconds between two checks while the host is blocked


class IssuedOp(Protocol):
    """An op that was issued to the GPU."""

    def join(self) -> None:
        """Make torch's current stream wait for the op; the host does not block."""

    def over(self) -> bool:
        """Return whether the GPU has completed the op. Thread-safe. Raises RuntimeError if the op failed."""


@dataclass(eq=False)
class Issued:
    """A transfer in progress.

    Called as a Finish, it makes the current stream wait for the transfer.

    Attributes:
        transfer: The transfer.
        on_device: Returns the context in which to use the GPU.
        demand_open: Raises RuntimeError if the group is closed, as the transfer may then have ended halfway.
        keep: Objects kept alive until the current stream waits or the transfer is complete.
        blocks: Whether a wait blocks the host until the transfer is complete.
        op: Name of the op, for messages.
        peer: Rank of the other side, for messages; None for all members.
        deadline: Deadline of the latest wait, in seconds of ``time.monotonic``.
        seconds: Timeout of the latest wait.
        failed: Why the transfer failed; "" if it has not.
    """

    transfer: IssuedOp
    on_device: Callable[[], AbstractContextManager[object]]
    demand_open: Callable[[], None]
    keep: list[object] = field(default_factory=list)
    blocks: bool = False
    op: str = ""
    peer: int | None = None
    deadline: float = math.inf
    seconds: float = math.inf
    failed: str = ""

    def __call__(self, timeout: float) -> None:
        """Wait for the transfer.

        It, and the GPU work queued before it, must be complete within ``timeout`` seconds from now.
        """
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
        self.keep.clear()


class Watcher:
    """Watches the ops of one group in a thread, until the first one fails or misses its deadline.

    Args:
        fault: Called as ``fault(op, peer, reason)`` for that op, as ``Group.fault`` is.
    """

    def __init__(self, fault: Callable[[str, int | None, str], object]) -> None:
        self._fault = fault
        self._issued: list[Issued] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def add(self, issued: Issued) -> None:
        """Watch an op until it is complete."""
        with self._changed:
            self._issued.append(issued)
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._watch, name="raypar watcher", daemon=True)
                self._thread.start()
            self._changed.notify()

    def pending(self) -> list[Issued]:
        """Return the ops that were incomplete at the last check, oldest first."""
        with self._changed:
            return list(self._issued)

    def stop(self) -> None:
        """Stop watching. It may be called from any thread, including the watcher's own."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def forget(self) -> None:
        """Release all ops and what they keep alive; call it only once the GPU has ended them all."""
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
        """Return why an op failed, "" if it has not; stop watching it if it is complete."""
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


def block_until_over(transfer: IssuedOp, deadline: float, seconds: float, demand_open: Callable[[], None]) -> None:
    """Block the host until a transfer is complete.

    Args:
        transfer: The transfer.
        deadline: When to give up, in seconds of ``time.monotonic``.
        seconds: The timeout that led to the deadline, for the message.
        demand_open: Raises RuntimeError if the group is closed.

    Raises:
        TimeoutError: The deadline has passed.
        RuntimeError: The transfer failed, or the group was closed.
    """
    pause = _SHORTEST
    try:
        while not transfer.over():
            demand_open()
            if time.monotonic() > deadline:
                raise TimeoutError(_late(seconds))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
    finally:
        demand_open()  # an aborted transfer also completes or fails: report the group's reason instead


def _late(seconds: float) -> str:
    return f"nothing came within {seconds:g} s"
