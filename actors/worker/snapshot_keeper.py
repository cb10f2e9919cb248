"""An actor's snapshots: it takes them, and holds those of other actors of its node and copies from other nodes.

It sends copies of its snapshots to another node. They have deadlines, and the snapshots stay until then.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from raypar.actors.checkpoint.buddy_copy import BuddyCopyReceiver, BuddyCopySender, send_copy_once
from raypar.actors.checkpoint.memory_snapshot import HeldMemoryFiles, Slots, SnapshotFiles, write_snapshots
from raypar.actors.checkpoint.reports import ShardReport, shard_report
from raypar.actors.checkpoint.snapshot_address import Address, Recipient, SnapshotOwner
from raypar.actors.machine.process_identity import own_identity
from raypar.actors.relayout.share_index import ShareContents, contents_of
from raypar.actors.specs.results import Copied
from raypar.actors.worker.build.plan import ActorPlan
from raypar.actors.worker.parameter_server import Server
from raypar.actors.worker.state import WorkerState
from raypar.actors.worker.worker import Worker

_COPIED_FILES = 3  # one copied snapshot, one that is being copied, and one for the next


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
        self.sender, self._slots, self._patience = BuddyCopySender(to), slots, patience
        self._begun, self._sent = deque[_Begun](), 0
        self._steps = 0

    def after_step(self) -> float:
        """Count a step, wait for a copy that is due, and unpin old snapshots; return the seconds waited."""
        self._steps += 1
        is_due = any(one.due == self._steps for one in self._begun)
        waited = self.sender.wait(self._patience) if is_due else 0.0
        while len(self._begun) > 1 and self._begun[1].due < self._steps:
            if self._begun.popleft().step == self._sent:
                self.sender.give_up()  # its snapshot is about to be overwritten
        self._pin()
        return waited

    def begin(self, step: int, within: int) -> None:
        """Begin to copy the snapshot of a step, and keep it.

        Args:
            step: Number of steps taken.
            within: Number of steps in which the copy should be complete.
        """
        if self.sender.begin(self._slots.file(step)):
            self._sent = step
        self._begun.append(_Begun(step, self._steps + within))
        self._pin()

    def _pin(self) -> None:
        self._slots.pinned = frozenset(one.step for one in self._begun)


class SnapshotKeeper:
    """Takes snapshots of one actor's state after steps, and reads those of a step back.

    Args:
        plan: The actor's plan.
        taken: Called with the step when a snapshot is copied, and not yet marked as complete.
    """

    def __init__(self, plan: ActorPlan, taken: Callable[[int], None]) -> None:
        self._share, self._every, self._taken = SnapshotOwner(plan.layout, plan.rank), plan.run.snapshot_every, taken
        self._files_each = _COPIED_FILES if plan.run.buddy_every else 2
        self._slots, self._held = Slots(plan.rank, self._files_each), HeldMemoryFiles(own_identity())
        self._receiver: BuddyCopyReceiver | None = None
        self._outgoing: OutgoingCopies | None = None

    def join(self, plan: ActorPlan, taken: Callable[[int], None]) -> None:
        """Rejoin the run, perhaps in another layout, in which snapshots begin anew.

        Args:
            plan: The actor's plan.
            taken: See the class.
        """
        self._taken, share = taken, SnapshotOwner(plan.layout, plan.rank)
        if share != self._share:
            self._held.adopt(self._share, self._slots.files)  # they stay readable until all actors have newer ones
            self._share, self._slots = share, Slots(plan.rank, self._files_each)

    def after(self, step: int, state: WorkerState, copy_within: int = 0) -> Copied:
        """Take a snapshot if one is due, and begin to copy it to the buddy if a copy is due.

        Args:
            step: Number of steps taken.
            state: The actor's state.
            copy_within: Number of steps in which the copy should be complete; 0 for no copy of this step.

        Raises:
            OSError: There is no memory for it.
        """
        waited = 0.0 if self._outgoing is None else self._outgoing.after_step()
        if step % self._every == 0:
            state.keep(self._slots, step, lambda: self._taken(step - 1))
            if copy_within and self._outgoing is not None:
                self._outgoing.begin(step, copy_within)
        return Copied(waited, "" if self._outgoing is None else self._outgoing.sender.lost)

    def begin(self, step: int, state: WorkerState) -> None:
        """Take a snapshot of the step after which the run goes on, if there is none, and forget those of later steps.

        Args:
            step: Number of steps taken; no snapshot is taken before the first one.
            state: The actor's state.

        Raises:
            OSError: There is no memory for it.
        """
        self._slots.forget_after(step)
        if step and step not in self._slots.steps:
            state.keep(self._slots, step, lambda: None)

    def drop_old(self) -> None:
        """Drop all snapshots that no actor writes to any more, once all actors have begun new ones.

        Those are the snapshots of replaced actors, and those that came from other nodes.
        """
        self.stop_copies()
        self._held.drop_old()

    def addresses(self) -> list[Address]:
        """Return the addresses of this actor's snapshots, and of those of others that it keeps."""
        return [self._written(self._share, self._slots.files), *self._held.addresses()]

    def hold(self, addresses: Sequence[Address]) -> None:
        """Keep the snapshots of other actors of this node, which are at these addresses."""
        self._held.expect_new()
        self._held.hold(addresses)

    # --- copies on other nodes ---

    def expect_copies(
        self, host: str, expected: Mapping[str, SnapshotOwner], files: int
    ) -> tuple[str, int, list[Address]]:
        """Prepare to receive copies of snapshots of actors of other nodes.

        Args:
            host: The address of this node that others reach.
            expected: The owners of the copies, by their tokens.
            files: Number of memory files for each.

        Returns:
            The address and the port that receive them, and their addresses for other actors of this node.

        Raises:
            OSError: It can't listen there.
        """
        self.stop_copies()
        self._receiver = BuddyCopyReceiver(host, expected, files)
        arriving = self._receiver.files()
        for share, fds in arriving.items():
            self._held.adopt(share, map(os.dup, fds))
        return host, self._receiver.port, [self._written(share, fds) for share, fds in arriving.items()]

    def begin_copies(self, to: Recipient | None, step: int, addresses: Sequence[Address], patience: float) -> None:
        """Begin to send copies, and keep those that arrive at this node.

        Args:
            to: The buddy; None if this actor has none.
            step: The step after which the run goes on; if it is not 0, its snapshot is sent first.
            addresses: Addresses of the copies that arrive.
            patience: The largest number of seconds that a step waits for a copy.
        """
        self._held.hold(addresses)
        if to is not None:
            self._outgoing = OutgoingCopies(to, self._slots, patience)
            if step:
                self._outgoing.begin(step, 1)

    def interrupt_copies(self) -> None:
        """Stop sending, so that no step waits for a copy. It may be called from another thread."""
        if (outgoing := self._outgoing) is not None:
            outgoing.sender.close()

    def stop_copies(self) -> None:
        """Stop sending and receiving copies. Complete ones stay."""
        if self._outgoing is not None:
            self._outgoing.sender.close()
            self._slots.pinned, self._outgoing = frozenset(), None
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    # --- going back ---

    def steps(self) -> dict[SnapshotOwner, tuple[int, ...]]:
        """Return, by owner, the steps of which this actor has a snapshot. It may be called during a step."""
        return self._files().steps()

    def contents(self, step: int, shares: Sequence[SnapshotOwner]) -> dict[SnapshotOwner, ShareContents]:
        """Return the parts of tensors in snapshots of a step. Raises KeyError if this actor lacks one."""
        files = self._files()
        return {share: contents_of(files.at(step, [share])) for share in shares}

    def send(self, step: int, to: Sequence[tuple[SnapshotOwner, Recipient]]) -> None:
        """Send snapshots of a step that this actor has, its own or those of others, one after the other.

        Args:
            step: Number of steps taken.
            to: The owners of the snapshots, with the recipients, which expect them; see ``expect_copies``.

        Raises:
            OSError: One of them did not arrive.
            KeyError: This actor lacks one of them.
        """
        files = self._files()
        for share, recipient in to:
            send_copy_once(files.file(share, step), recipient)

    def write(self, step: int, shares: Sequence[SnapshotOwner], folder: str) -> list[ShardReport]:
        """Write snapshots of a step that this actor has as shards of a checkpoint; see ``write_snapshots``.

        It may be called during a step.
        """
        return [*map(shard_report, write_snapshots(self._files(), step, shares, Path(folder)))]

    def restore(
        self, step: int, shares: Sequence[SnapshotOwner], arrived: Sequence[Address], state: WorkerState
    ) -> None:
        """Load the snapshots of a step.

        Args:
            step: Number of steps taken.
            shares: The owners of those that have this actor's state, in the layout in which they were taken; or all.
            arrived: Addresses of those that came from other nodes.
            state: The actor's state.

        Raises:
            CheckpointError: They are incomplete.
            KeyError: This actor lacks one of them.
        """
        self._held.hold(arrived)
        files = self._files()
        state.load(files, files.at(step, shares))

    def forget_after(self, step: int) -> None:
        """Forget this actor's snapshots of later steps, which are taken again, and stop sending."""
        self.stop_copies()
        self._slots.forget_after(step)

    def leave(self, comes_back: bool) -> None:
        """Stop sending and receiving copies, and drop all snapshots unless this actor rejoins the run."""
        self.stop_copies()
        if not comes_back:
            self._held.close()
            self._slots.close()

    def _written(self, share: SnapshotOwner, files: tuple[int, ...]) -> Address:
        return Address(share, own_identity(), files, is_written=True)

    def _files(self) -> SnapshotFiles:
        others: Mapping[SnapshotOwner, Sequence[int]] = self._held.files()
        return SnapshotFiles({**others, self._share: (*others.get(self._share, ()), *self._slots.files)})


def keeper_of(keeper: SnapshotKeeper | None) -> SnapshotKeeper:
    """Return the keeper of an actor. Raises RuntimeError if it has none."""
    if keeper is None:
        raise RuntimeError("this actor keeps no snapshots: its run has none, or it has not started")
    return keeper


def keep_after(member: Worker | Server, keeper: SnapshotKeeper | None, step: int, copy_within: int) -> Copied:
    """Take the snapshot that is due after a step, if the actor keeps any.

    Args:
        member: The worker or parameter server.
        keeper: Its snapshots; None if its run has none.
        step: Number of the step, from 0.
        copy_within: See ``SnapshotKeeper.after``.

    Returns:
        The state of the copies.

    Raises:
        ActionError: It can't be taken.
    """
    copied = Copied()
    try:
        member.faults.reach("end", step)
        if keeper is not None:
            copied = keeper.after(step + 1, member.state, copy_within)
        member.faults.reach("report", step)
        return copied
    except Exception as error:
        raise member.context.failed("snapshot after the step", None, error) from None
