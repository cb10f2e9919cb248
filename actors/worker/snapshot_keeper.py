"""An actor's part in the snapshots of a run: it takes its own, and keeps those of the other actors of its node."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from raypar.actors.checkpoint.memory_snapshot import Address, Held, Share, Slots, SnapshotFiles
from raypar.actors.collective.shm.links import place
from raypar.actors.worker.plan import Plan
from raypar.actors.worker.state import WorkerState


class SnapshotKeeper:
    """Takes snapshots of one actor's state after steps, and reads those of a step back.

    Args:
        plan: The actor's plan.
        taken: Called when a snapshot is copied, and not yet marked as whole, with the step.
    """

    def __init__(self, plan: Plan, taken: Callable[[int], None]) -> None:
        self._share, self._every, self._taken = Share(plan.layout, plan.rank), plan.run.snapshot_every, taken
        self._slots, self._held = Slots(plan.rank), Held(place())

    def join(self, plan: Plan, taken: Callable[[int], None]) -> None:
        """Take part in the run again, perhaps in another layout, in which snapshots begin anew.

        Args:
            plan: The actor's plan.
            taken: See the class.
        """
        self._taken, share = taken, Share(plan.layout, plan.rank)
        if share != self._share:
            self._held.adopt(self._share, self._slots.files)  # to be read, until all have others
            self._share, self._slots = share, Slots(plan.rank)

    def after(self, step: int, state: WorkerState) -> None:
        """Take a snapshot if one is due.

        Args:
            step: Number of steps taken.
            state: The actor's state.

        Raises:
            OSError: There is no memory left for it.
        """
        if step % self._every == 0:
            state.keep(self._slots, step, lambda: self._taken(step - 1))

    def begin(self, step: int, state: WorkerState) -> None:
        """Have a snapshot of the step that the run goes on after, and none of later ones, which are taken again.

        Args:
            step: Number of steps taken. There is nothing to go back to before the first one.
            state: The actor's state.

        Raises:
            OSError: There is no memory left for it.
        """
        self._slots.forget_after(step)
        if step and step not in self._slots.steps:
            state.keep(self._slots, step, lambda: None)

    def drop_old(self) -> None:
        """Let go of the snapshots of actors that were replaced: all those that are there have begun with their own."""
        self._held.drop_old()

    def addresses(self) -> list[Address]:
        """Return where others find this actor's snapshots, and those of others that it keeps."""
        own = Address(self._share, place(), os.getpid(), self._slots.files, is_own=True)
        return [own, *self._held.addresses()]

    def hold(self, addresses: Sequence[Address]) -> None:
        """Keep the snapshots of other actors of this node, those that are at these addresses."""
        self._held.expect_new()
        self._held.hold(addresses)

    def receive(self, share: Share, raw: bytes) -> None:
        """Keep a copy of a snapshot that another node has."""
        self._held.receive(share, raw)

    def steps(self) -> dict[Share, tuple[int, ...]]:
        """Return, by share, the steps of which this actor has a snapshot."""
        return self._files().steps()

    def raw(self, share: Share, step: int) -> bytes:
        """Return a snapshot that this actor has, for another node."""
        return self._files().raw(share, step)

    def restore(self, step: int, shares: Sequence[Share], state: WorkerState) -> None:
        """Load the snapshots of a step.

        Args:
            step: Number of steps taken.
            shares: All shares of the state, of the layout in which they were taken.
            state: The actor's state.

        Raises:
            CheckpointError: They are not whole.
            KeyError: One of them is not here.
        """
        files = self._files()
        state.load(files, files.at(step, shares))

    def forget_after(self, step: int) -> None:
        """Forget this actor's snapshots of later steps, which are taken again."""
        self._slots.forget_after(step)

    def close(self) -> None:
        """Let go of all snapshots."""
        self._held.close()
        self._slots.close()

    def _files(self) -> SnapshotFiles:
        others: Mapping[Share, Sequence[int]] = self._held.files()
        return SnapshotFiles({**others, self._share: (*others.get(self._share, ()), *self._slots.files)})
