"""The copies of its snapshots that an actor sends: their deadlines, and the snapshots that must stay until then."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from raypar.actors.checkpoint.memory_snapshot import Slots
from raypar.actors.checkpoint.snapshot_address import Recipient
from raypar.actors.checkpoint.snapshot_copy import CopySender


class _Begun(NamedTuple):
    """A copy that was begun.

    Attributes:
        step: Number of steps taken before the snapshot.
        due: The step, counted from the beginning of copies, at whose end the copy should be complete.
    """

    step: int
    due: int


class OutgoingCopies:
    """Sends copies of an actor's snapshots to its buddy, and pins those that the actor must keep.

    A copy on the buddy is useful only with the copies of all other actors of the same step. So each actor keeps a
    snapshot until all copies of a later step are complete: every actor waits at the end of the step at which a copy is
    due, and no actor ends the next step before all others have reached it.

    Args:
        to: The buddy.
        slots: The actor's snapshots.
        patience: The largest number of seconds that a step waits for a copy.
    """

    def __init__(self, to: Recipient, slots: Slots, patience: float) -> None:
        self._sender, self._slots, self._patience = CopySender(to), slots, patience
        self._begun, self._sent = deque[_Begun](), 0
        self._steps = 0

    @property
    def lost(self) -> str:
        """Why no more copies are sent; "" as long as some are."""
        return self._sender.lost

    def after_step(self) -> float:
        """Count a step, wait for a copy that is due, and unpin old snapshots; return the seconds waited."""
        self._steps += 1
        is_due = any(one.due == self._steps for one in self._begun)
        waited = self._sender.wait(self._patience) if is_due else 0.0
        while len(self._begun) > 1 and self._begun[1].due < self._steps:
            if self._begun.popleft().step == self._sent:
                self._sender.give_up()  # its snapshot is about to be overwritten
        self._pin()
        return waited

    def begin(self, step: int, within: int) -> None:
        """Begin to copy the snapshot of a step, and keep it.

        Args:
            step: Number of steps taken.
            within: Number of steps in which the copy should be complete.
        """
        if self._sender.begin(self._slots.file(step)):
            self._sent = step
        self._begun.append(_Begun(step, self._steps + within))
        self._pin()

    def close(self) -> None:
        """Send no more copies."""
        self._sender.close()

    def _pin(self) -> None:
        self._slots.pinned = frozenset(one.step for one in self._begun)
