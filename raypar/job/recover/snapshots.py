"""The driver's part in snapshots: which actor holds which, and going back to the newest complete step, or saving it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from raypar.actors.checkpoint.buddy_copy import SILENCE
from raypar.actors.checkpoint.memory_snapshot import HeldMemoryFiles
from raypar.actors.checkpoint.snapshot_address import Address, Recipient, SnapshotOwner
from raypar.actors.machine.process_identity import ProcessIdentity, own_identity
from raypar.actors.relayout.share_index import ShareIndex
from raypar.actors.specs.run import Run
from raypar.checkpoint.save import Save
from raypar.cluster.calls.calls import Calls
from raypar.errors import JobError
from raypar.job.recover.background_save import run_manifest
from raypar.job.recover.buddies import CopyPace, buddies_of, failure_domains
from raypar.job.recover.transfers import Steps, chosen_holders, has_all, holders_of, transfers
from raypar.job.start.lifetime import HEARD
from raypar.job.start.loaded_run import LoadedRun
from raypar.paths import CHECKPOINTS, absolute, checkpoints
from raypar.planner.memory.snapshots import kept_copies
from raypar.schedules.grouped import grouped

_HEARD = 5.0  # seconds in which an actor that takes no part in the run answers


class Snapshots:
    """The snapshots of a run's actors, of all layouts in which it goes on.

    Attributes:
        source: All shares of the layout in which the last snapshots were taken that all ranks have begun with.
        pace: How often they are copied to other nodes; None if they are not.
        are_kept_for_stop: Whether they are taken in a run that does not survive failures, so that it can be saved as
            it was before the step in which it is stopped.
    """

    def __init__(self) -> None:
        self.are_kept_for_stop = False
        self._held = HeldMemoryFiles(own_identity())
        self.source: tuple[SnapshotOwner, ...] = ()
        self.pace: CopyPace | None = None

    def close(self) -> None:
        """Drop all snapshots."""
        self._held.close()
        self.source, self.pace, self.are_kept_for_stop = (), None, False

    def share(self, loaded: LoadedRun, others: Calls) -> Steps:
        """Make every process hold the snapshots of all actors of its node.

        Args:
            loaded: The run; its actors have joined it.
            others: Calls to actors that have no rank in it. They may have had one in the layout before.

        Returns:
            The steps that each has then, by rank, and then of the others.
        """
        calls = loaded.calls
        if not self.are_taken(loaded.run):
            return []
        of_ranks = calls.all("snapshots", "addresses", what="sharing snapshots")
        beside = self._asked(others, "addresses")
        addresses: list[Address] = [address for of_one in of_ranks for address in of_one]
        addresses += [replace(address, is_written=False) for of_one in beside for address in of_one or ()]
        there = _by_domain([*addresses, *self._held.addresses()])
        domains = [of_one[0].process.pid_domain for of_one in of_ranks]  # the first address is the actor's own
        calls.each("snapshots", [("hold", there.get(domain, ())) for domain in domains], what="sharing snapshots")
        self._held.expect_new()
        self._held.hold(addresses)
        steps = calls.all("snapshots", "steps", what="sharing snapshots")
        return [*steps, *(found or {} for found in self._asked(others, "steps"))]

    def common(self, steps: Steps, most: int) -> int | None:
        """Return the newest step, up to ``most``, of which all shares are there; None if there is none."""
        if not self.source:
            return None
        there: dict[SnapshotOwner, set[int]] = {share: set() for share in self.source}
        for of_one in steps:
            for share, its in of_one.items():
                if share in there:
                    there[share].update(its)
        return max((step for step in set.intersection(*there.values()) if step <= most), default=None)

    def restore(
        self, loaded: LoadedRun, others: Calls, steps: Steps, step: int, processes: Sequence[ProcessIdentity]
    ) -> None:
        """Send the snapshots of a step to the nodes whose actors need and lack them, and make all actors go back to it.

        Args:
            loaded: The run.
            others: Calls to actors without a rank.
            steps: What ``share`` returned.
            step: Number of steps taken.
            processes: By rank, the process of its actor.
        """
        calls, everyone = loaded.calls, [*loaded.calls.handles, *others.handles]
        domains, what = [process.pid_domain for process in processes], f"going back to step {step}"
        if has_all(steps[: len(domains)], self.source, step):
            calls.all("restore", step, calls.shared(self.source), (), what=what)
            return
        needed = self._needed(calls, others, steps, step)
        going = {secrets.token_hex(16): one for one in transfers(domains, steps, needed, step)}
        expected, sent = dict[int, dict[str, SnapshotOwner]](), dict[int, list[tuple[SnapshotOwner, Recipient]]]()
        for token, one in going.items():
            expected.setdefault(one.receiver, {})[token] = one.share
        refs = [calls.handles[rank].expect_copies.remote(shares, 1) for rank, shares in expected.items()]
        opened = dict(zip(expected, calls.gather(refs, "expecting snapshots", [*expected]), strict=True))
        for token, one in going.items():
            host, port, _ = opened[one.receiver]
            sent.setdefault(one.giver, []).append((one.share, Recipient(host, port, token)))
        done = {giver: everyone[giver].send_snapshots.remote(step, to) for giver, to in sent.items()}
        ranked = [giver for giver in done if giver < loaded.world.size]
        calls.gather([done[giver] for giver in ranked], "sending snapshots", ranked)
        rest: dict[str, dict[int, Any]] = {}  # by domain, the calls of those without a rank that send to it
        for one in going.values():
            if one.giver >= loaded.world.size:
                rest.setdefault(domains[one.receiver], {})[one.giver] = done[one.giver]
        there = _by_domain(replace(address, is_written=False) for *_, of_one in opened.values() for address in of_one)
        arguments = list[tuple[object, ...]]()
        for domain, shares in zip(domains, needed, strict=True):
            own = {*shares}
            arrived = [address for address in there.get(domain, ()) if address.share in own]
            arguments.append((step, shares, arrived, *rest.get(domain, {}).values()))  # their errors come with it
        calls.each("restore", arguments, what=what)

    def _needed(self, calls: Calls, others: Calls, steps: Steps, step: int) -> Sequence[Sequence[SnapshotOwner]]:
        """Return by rank the shares of a step that its actor needs.

        Actors that have shares list the parts of tensors in them, and each actor finds there the shares that it loads.
        The arguments are those of ``restore``.

        Raises:
            JobError: An actor failed.
        """
        size, what = len(calls.handles), f"finding the snapshots of step {step}"
        chosen = chosen_holders(steps, size, self.source, step)
        everyone = [*calls.handles, *others.handles]
        refs = {actor: everyone[actor].snapshots.remote("contents", step, shares) for actor, shares in chosen.items()}
        ranked = [actor for actor in refs if actor < size]
        found = [*calls.gather([refs[actor] for actor in ranked], what, ranked)]
        rest = {actor - size: ref for actor, ref in refs.items() if actor >= size}
        found += (answers := others.answers_to(rest, _HEARD)).values()
        if len(answers) < len(rest):
            raise JobError(f"{what} failed: an actor that leaves the run gave no answer")
        index = ShareIndex({share: tensors for of_one in found for share, tensors in of_one.items()})
        return calls.all("needed_shares", calls.shared(index), what=what)

    def begin(
        self, loaded: LoadedRun, layout: int, others: Calls, step: int, processes: Sequence[ProcessIdentity]
    ) -> None:
        """Make the actors go on after a step with snapshots of it, and drop the snapshots of other steps and layouts.

        Args:
            loaded: The run.
            layout: The number of its layout.
            others: Calls to actors without a rank.
            step: Number of steps taken.
            processes: By rank, the process of its actor.
        """
        if self.are_taken(loaded.run):
            loaded.calls.all("begin_snapshots", step, what="taking snapshots")
            self.source = tuple(SnapshotOwner(layout, rank) for rank in range(loaded.world.size))
            loaded.calls.all("snapshots", "drop_old", what="taking snapshots")
            self._held.drop_old()
            others.answers(range(len(others.handles)), "leave", seconds=_HEARD)
            if takes_snapshots(loaded.run):
                self._copy(loaded, step, processes)

    def are_taken(self, run: Run) -> bool:
        """Return whether the actors of a run take snapshots."""
        return self.are_kept_for_stop or takes_snapshots(run)

    def _copy(self, loaded: LoadedRun, step: int, processes: Sequence[ProcessIdentity]) -> None:
        """Choose a buddy on another node for each actor, and let copies of snapshots begin with that of a step."""
        run, calls, ranks = loaded.run, loaded.calls, range(loaded.world.size)
        buddies = buddies_of(failure_domains(processes)) if run.buddy_every else ()
        self.pace = CopyPace(run) if any(buddy is not None for buddy in buddies) else None
        if self.pace is None:
            return
        tokens = [secrets.token_hex(16) for _ in ranks]
        expected: list[dict[str, SnapshotOwner]] = [{} for _ in ranks]
        for rank, buddy in enumerate(buddies):
            if buddy is not None:
                expected[buddy][tokens[rank]] = self.source[rank]
        kept = kept_copies(run)
        opened = calls.each("expect_copies", [(its, kept) for its in expected], what="expecting copies of snapshots")
        addresses = [address for *_, of_one in opened for address in of_one]
        to = [
            None if buddy is None else Recipient(opened[buddy][0], opened[buddy][1], tokens[rank])
            for rank, buddy in enumerate(buddies)
        ]
        there, patience = _by_domain(addresses), min(SILENCE, run.timeout / 3)
        arguments = [
            ("begin_copies", recipient, step, there.get(process.pid_domain, ()), patience)
            for recipient, process in zip(to, processes, strict=True)
        ]
        calls.each("snapshots", arguments, what="beginning copies of snapshots")
        self._held.hold(addresses)

    def _asked(self, others: Calls, method: str) -> list[Any]:
        """Call a method of the keepers of actors that have no rank; None for those that do not answer, or have none."""
        answers = others.answers(range(len(others.handles)), "snapshots", method, seconds=_HEARD)
        return [answers.get(number) for number in range(len(others.handles))]


def _by_domain(addresses: Iterable[Address]) -> dict[str, list[Address]]:
    """Return addresses by the domain in which processes can open the files that are there."""
    return grouped((address.process.pid_domain, address) for address in addresses)


def takes_snapshots(run: Run) -> bool:
    """Return whether the actors of a run take snapshots, which it goes back to after failures."""
    return run.max_failures > 0 and run.snapshot_every > 0


def last_checkpoint(run: Run, calls: Calls, snapshots: Snapshots, taken: int) -> Path | None:
    """Save the newest step with all snapshots as a checkpoint.

    The state of dead actors is not lost: snapshots outlive their actors, and other nodes have copies.

    Args:
        run: The run, with all its replicas.
        calls: Calls to its actors, of which some may be dead, or busy.
        snapshots: The run's snapshots.
        taken: Number of steps that the driver has reports of.

    Returns:
        The checkpoint; None if there are no snapshots of a step that is not saved yet, or the run has no folder.

    Raises:
        CheckpointError: It can't be written.
        JobError: An actor failed meanwhile.
    """
    if run.folder is None or not snapshots.are_taken(run):
        return None
    calls.abort()  # none of those that are in a step takes another one, so that no snapshot is written over
    there = calls.answers(range(len(calls.handles)), "snapshots", "steps", seconds=HEARD, group="disk")
    step, folder = snapshots.common([*there.values()], taken), absolute(run.folder) / CHECKPOINTS
    saved = max((step for step, _ in checkpoints(folder)), default=0) if folder.is_dir() else 0
    if step is None or step <= saved:
        return None
    writes: Mapping[int, list[object]] = {rank: [] for rank in there}
    holders = holders_of(step, there)
    for share in snapshots.source:
        writes[min(holders[share], key=lambda rank: len(writes[rank]))].append(share)
    with Save(folder, step) as save:
        writing = {rank: calls.handles[rank].snapshots.options(concurrency_group="disk") for rank in writes}
        refs = [writing[rank].remote("write", step, shares, str(save.path)) for rank, shares in writes.items()]
        written = calls.gather(refs, "saving snapshots", [*writes])
        reports = [report for of_one in written for report in of_one]
        return save.commit(run_manifest(run, step, reports), run.keep_last)
