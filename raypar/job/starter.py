"""Start a run on a job's actors, and again, after a failure, with others in the place of those that failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from raypar.actors.checkpoint.memory_snapshot import Held
from raypar.actors.collective.shm.links import place
from raypar.actors.sharding import Shard
from raypar.actors.specs.injected_fault import InjectedFault
from raypar.actors.specs.types import DeviceKind
from raypar.checkpoint.find import Found, newest
from raypar.config.schedule import Programs
from raypar.errors import JobError, NoRoomError
from raypar.job.lifetime import Lifetime
from raypar.job.loaded_run import Guard, LoadedRun
from raypar.job.plans import plans_of
from raypar.paths import CHECKPOINTS, absolute
from raypar.recovery.failures import Failure, Failures, death_in, reason_of, told

log = logging.getLogger(__name__)
_HEARD = 2.5  # seconds in which an actor that lives answers: a GIL may be held for 2 s
_FREE = 5.0  # seconds in which an actor whose groups were aborted gets out of its step
_STARTED = 30.0  # seconds in which a new actor starts on a node that lives
_ELSEWHERE = 60.0  # the same where it has just been given a home
_JOINING = 1.0  # the same of an actor that joins groups, which it does not leave as long as others may come


class Starter:
    """Starts runs on a job's actors.

    Args:
        lifetime: The life of the job's actors.
        job: The job's name.
        device: Device that the actors compute on.
        faults: Faults that are injected on purpose.
    """

    def __init__(self, lifetime: Lifetime, job: str, device: DeviceKind, faults: Sequence[InjectedFault]) -> None:
        self._lifetime, self._job, self._device, self._faults = lifetime, job, device, faults
        self._generation = 0
        self._held, self._processes = Held(place()), lifetime.processes
        self.failures = Failures(0)

    def start(self, loaded: LoadedRun, programs: Programs, found: Found | None) -> Sequence[Mapping[str, Shard]]:
        """Make the actors build a run, and load a checkpoint if there is one.

        Args:
            loaded: The run.
            programs: Its lowered schedules.
            found: The checkpoint; None for a new run.

        Returns:
            By rank, the shard that the rank holds of each of its logical parameters.
        """
        self._loaded, self._programs, self._found = loaded, programs, found
        self.failures = Failures(loaded.run.max_failures)
        self._held.close()
        holds = self._join(loaded, found, partial(self._lifetime.guard, patient=False))
        self._lifetime.guard(self._hold, patient=False)
        self._lifetime.guard(partial(self._begin, 0 if found is None else found.manifest.step), patient=False)
        return holds

    def recover(self, step: int, error: JobError, lost: Callable[[int], float]) -> Failure:
        """Bring the run back after a failure, and return what has failed, and where the run goes on.

        All actors go back to the newest snapshots that all of them have taken, or else to the newest checkpoint. Those
        that do not answer are replaced. A failure in the meantime counts as another one.

        Args:
            step: The step under way, counted from 1.
            error: What failed.
            lost: Returns the seconds that the failure has cost until now, if the run goes back to so many steps.

        Raises:
            JobError: It is one failure too many, or no node has room for another actor.
        """
        start, replaced = time.monotonic(), list[str]()
        reason, death = reason_of(error), death_in(error)
        while True:
            self.failures.count(step, error)
            log.warning("%s", told(error))
            gone = self._clear(_JOINING if replaced else _FREE)
            replaced += [self._loaded.world.label(rank) for rank in gone]
            try:
                self._replace(gone)
                back_to, source = self._again(step - 1)
            except NoRoomError as end:
                end.add_note(f"It was lost so: {reason}.")
                raise
            except JobError as next_error:
                error = next_error
                continue
            break
        seconds, names = time.monotonic() - start, tuple(dict.fromkeys(replaced))
        failure = Failure(step, reason, names, back_to, source, seconds, lost(back_to), death)
        self.failures.survived.append(failure)
        log.warning("%s", failure)
        return failure

    def close(self) -> None:
        """Let go of the snapshots. A second call does nothing."""
        self._held.close()

    def _clear(self, seconds: float) -> list[int]:
        """Make the actors leave their groups. Returns those that are dead or do not get free in so many seconds."""
        calls, world = self._loaded.calls, self._loaded.world
        calls.abort()
        everyone = range(world.size)
        alive = calls.answers(everyone, "progress", seconds=_HEARD, group="ctl")
        free = calls.answers(alive, "leave", True, seconds=seconds)
        return [rank for rank in everyone if rank not in free]

    def _replace(self, gone: Sequence[int]) -> None:
        """Put other actors in the place of these. Raises NoRoomError if one does not start on any node."""
        calls, world = self._loaded.calls, self._loaded.world
        for rank in gone:
            self._processes.kill(rank)
            name = f"{self._job} {world.label(rank)} {self._generation + 1}"
            calls.replace(rank, self._lifetime.replace(rank, name))
        started = calls.heard(gone, _STARTED)
        lost = [rank for rank in gone if rank not in started]  # their nodes may be gone too
        for rank in lost:
            name = f"{self._job} {world.label(rank)} {self._generation + 1} elsewhere"
            calls.replace(rank, self._lifetime.replace(rank, name, elsewhere=True))
        started = calls.heard(lost, _ELSEWHERE)
        if missing := [world.label(rank) for rank in lost if rank not in started]:
            raise NoRoomError(f"no other actor starts in the place of {' and '.join(missing)}")

    def _again(self, taken: int) -> tuple[int, str]:
        """Start the run again on its actors. Returns after which step it goes on, and where its state is from.

        Args:
            taken: Number of steps that the driver has reports of. Actors may have taken another one.
        """
        loaded = self._loaded
        found = self._newest()
        saved = 0 if found is None else found.manifest.step
        self._join(loaded, None, _unguarded)
        steps = self._hold()
        common = self._common(steps, taken)
        if common is not None and common >= saved:
            self._fetch(common, steps)
            loaded.calls.all("restore", common, loaded.world.size, what=f"going back to step {common}")
            self._begin(common)
            return common, "memory"
        if found is not None:
            if not found.path.exists():
                raise JobError(
                    f"the run began with {found.path}, which is there no more: nothing is left to go back to"
                )
            loaded.load(found)
        self._begin(saved)
        return saved, self._name(found)

    def _name(self, found: Found | None) -> str:
        return "" if found is None else found.path.name

    def _newest(self) -> Found | None:
        """Return the newest checkpoint of the run, or else the one that it began with."""
        folder = self._loaded.run.folder
        saved = None if folder is None else newest(absolute(folder) / CHECKPOINTS)
        return saved or self._found

    def _join(self, loaded: LoadedRun, found: Found | None, guard: Guard) -> Sequence[Mapping[str, Shard]]:
        """Make the actors join new groups and build the run, and load a checkpoint if there is one."""
        self._generation += 1
        plans = plans_of(loaded.run, self._programs, self._job, self._generation, self._device, self._faults)
        holds = loaded.start(plans, found, guard, again=guard is _unguarded)
        located = loaded.calls.answers(range(loaded.world.size), "located", seconds=_HEARD, group="ctl")
        self._processes.know({rank: at for rank, at in located.items() if at.place == place() != ""})
        return holds

    def _hold(self) -> list[dict[int, tuple[int, ...]]]:
        """Make every process hold the snapshots of all actors of its node. Returns which steps it has then, by rank."""
        calls = self._loaded.calls
        if not self._takes_snapshots:
            return [{} for _ in calls.handles]
        shared = calls.all("snapshot_addresses", what="sharing snapshots")
        addresses = [address for of_one in shared for address in of_one]
        calls.all("hold_snapshots", [*addresses, *self._held.addresses()], what="sharing snapshots")
        self._held.expect_new()
        self._held.hold(addresses)
        return list(calls.all("snapshot_steps", what="sharing snapshots"))

    @property
    def _takes_snapshots(self) -> bool:
        run = self._loaded.run
        return run.max_failures > 0 and run.snapshot_every > 0

    def _begin(self, step: int) -> None:
        """Make the actors go on after so many steps with a snapshot of it, and without those of actors replaced."""
        if self._takes_snapshots:
            self._loaded.calls.all("begin_snapshots", step, what="taking snapshots")
            self._loaded.calls.all("drop_old_snapshots", what="taking snapshots")
            self._held.drop_old()

    def _common(self, steps: Sequence[Mapping[int, Sequence[int]]], most: int) -> int | None:
        """Return the newest step, up to ``most``, of which there is a snapshot of every rank; None if there is none."""
        there = [{step for of_one in steps for step in of_one.get(rank, ())} for rank in range(self._loaded.world.size)]
        return max((step for step in set.intersection(*there) if step <= most), default=None)

    def _fetch(self, step: int, steps: Sequence[Mapping[int, Sequence[int]]]) -> None:
        """Bring snapshots to the actors that lack them, from actors of other nodes."""
        calls, world = self._loaded.calls, self._loaded.world
        refs, ranks = list[Any](), list[int]()
        for owner in range(world.size):
            lacking = [rank for rank in range(world.size) if step not in steps[rank].get(owner, ())]
            if lacking:
                having = next(rank for rank in range(world.size) if step in steps[rank].get(owner, ()))
                raw = calls.handles[having].snapshot.remote(owner, step)
                refs += [calls.handles[rank].receive_snapshot.remote(owner, raw) for rank in lacking]
                ranks += lacking
        calls.gather(refs, "fetching snapshots", ranks)


def _unguarded(call: Callable[[], list[Any]]) -> list[Any]:
    """Call without ending the job at a failure: another recovery follows."""
    return call()
