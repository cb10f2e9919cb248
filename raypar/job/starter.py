"""Start a run on a job's actors, and again after a failure: with others in the place of those that failed, or fewer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from raypar.actors.collective.shm.links import place
from raypar.actors.sharding import Shard
from raypar.actors.specs.injected_fault import InjectedFault
from raypar.actors.specs.results import StepResult
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind
from raypar.checkpoint.find import Found, newest
from raypar.cluster.calls import Calls
from raypar.cluster.nodes import own_node
from raypar.cluster.notices import Notices
from raypar.config.schedule import Programs
from raypar.errors import JobError, NoRoomError
from raypar.job.clocks import align
from raypar.job.last_checkpoint import last_checkpoint
from raypar.job.layouts import Layout, Layouts
from raypar.job.lifetime import Lifetime
from raypar.job.loaded_run import Guard, LoadedRun, loaded_on
from raypar.job.plans import begun, plans_of
from raypar.job.room import no_room, room_awaited, why_no_room
from raypar.job.snapshots import Snapshots, takes_snapshots
from raypar.paths import CHECKPOINTS, absolute
from raypar.recovery.failures import Failure, Failures, death_in, reason_of, told
from raypar.recovery.seats import seats_of

Holds = Sequence[Mapping[str, Shard]]  # by rank, the shard of each of its logical parameters

log = logging.getLogger(__name__)
_HEARD = 2.5  # seconds in which an actor that lives answers: a GIL may be held for 2 s
_FREE = 5.0  # seconds in which an actor whose groups were aborted gets out of its step
_JOINING = 1.0  # the same of an actor that joins groups, which it does not leave as long as others may come
_NAMED = 4  # lost actors that a message names
_LOOK = 5.0  # seconds between two looks whether there is room for actors that are missing


class Starter:
    """Starts runs on a job's actors.

    Args:
        lifetime: The life of the job's actors.
        job: The job's name.
        device: Device that the actors compute on.
        faults: Faults that are injected on purpose.
        moved: Called when the run goes on in another layout, with the run and what its ranks hold.

    Attributes:
        failures: The failures of the run.
        awaits_room: Whether it waits for nodes, or was interrupted while it did: then nothing else is under way.
    """

    def __init__(
        self,
        lifetime: Lifetime,
        job: str,
        device: DeviceKind,
        faults: Sequence[InjectedFault],
        moved: Callable[[LoadedRun, Holds], None],
    ) -> None:
        self._lifetime, self._job, self._device, self._faults, self._moved = lifetime, job, device, faults, moved
        self._generation = self._number = 0  # how often actors have joined groups, and the layout has changed
        self._snapshots, self._witnesses = Snapshots(), lifetime.witnesses
        self._places = list[str]()  # by rank
        self._next_look, self._notices, self._stays_told = 0.0, Notices(), False
        self.failures, self.awaits_room = Failures(0), False

    def start(self, loaded: LoadedRun, programs: Programs, found: Found | None) -> Holds:
        """Make the actors build a run, and load a checkpoint if there is one.

        Args:
            loaded: The run.
            programs: Its lowered schedules.
            found: The checkpoint; None for a new run.

        Returns:
            By rank, the shard that the rank holds of each of its logical parameters.
        """
        self._loaded = self._told = loaded
        self._found = found
        self._layouts = Layouts(Layout(loaded.run, programs), loaded.skeleton)
        self._layout, self._number = self._layouts.whole, self._number + 1
        self.failures = Failures(loaded.run.max_failures)
        self._snapshots.close()
        here, homes = own_node(), self._lifetime.actors.homes[: loaded.world.size]
        self._witnesses.attend({home.where() for home in homes} - {here, ""})  # they start while the actors do
        holds = self._join(found, partial(self._lifetime.guard, patient=False))
        share = partial(self._snapshots.share, loaded, self._others)
        self._lifetime.guard(share, patient=False)
        self._lifetime.guard(partial(self._begin, 0 if found is None else found.manifest.step), patient=False)
        return holds

    @property
    def run(self) -> Run:
        """The run, with all its replicas."""
        return self._layouts.whole.run

    def recover(self, step: int, error: JobError, lost: Callable[[int], float]) -> Failure:
        """Bring the run back after a failure, and return what has failed, and where the run goes on.

        All actors go back to the newest snapshots that all of them have taken, or else to the newest checkpoint. Those
        that do not answer are replaced; where there is no room for others, the run goes on with fewer replicas. A
        failure in the meantime counts as another one.

        Args:
            step: The step under way, counted from 1.
            error: What failed.
            lost: Returns the seconds that the failure has cost until now, if the run goes back to so many steps.

        Raises:
            JobError: It is one failure too many, or there are too few actors.
        """
        start, gone = time.monotonic(), list[str]()
        reason, death, before = reason_of(error), death_in(error), self._layout
        while True:
            self._heed_notices()
            self.failures.count(step, error, is_foreseen=getattr(error, "rank", None) in self._left)
            log.warning("%s", told(error))
            ranks = self._clear(_JOINING if gone else _FREE)
            gone += [self._loaded.world.label(rank) for rank in ranks]
            try:
                self._replace(ranks)
                back_to, source = self._again(step - 1)
                self._lifetime.actors.dismiss(self._layout.world.size)
            except NoRoomError as end:
                end.add_note(f"It was lost so: {reason}.")
                raise
            except JobError as next_error:
                error = next_error
                continue
            break
        size = self._size_told(gone) if self._layout.world.mesh.dp < before.world.mesh.dp else ""
        replaced, seconds = () if size else tuple(dict.fromkeys(gone)), time.monotonic() - start
        failure = Failure(step, reason, replaced, back_to, source, seconds, lost(back_to), death, size=size)
        self.failures.survived.append(failure)
        log.warning("%s", failure)
        return failure

    def _size_told(self, lost: Sequence[str]) -> str:
        """Say how many replicas the run goes on with, without which actors."""
        run, whole = self._layout.run, self.run
        each, who = f"{run.microbatches} microbatches each instead of {whole.microbatches}", [*dict.fromkeys(lost)]
        more = f" and {len(who) - _NAMED} more" if len(who) > _NAMED else ""
        return f"dp={run.mesh.dp} instead of {whole.mesh.dp}, {each}, without {' and '.join(who[:_NAMED])}{more}"

    def go_on_after(self, step: int) -> int:
        """Begin snapshots anew where the actors have gone back to a step by themselves, and return that step.

        Raises:
            JobError: It failed; the run can be recovered.
        """
        self._snapshots.share(self._loaded, self._others)
        self._begin(step)
        return step

    def copy_due(self, step: int) -> int:
        """Return in how many steps a copy of the snapshots after a step should be on other nodes; 0: there is none."""
        return 0 if self._snapshots.pace is None else self._snapshots.pace.within(step)

    def learn(self, results: Sequence[StepResult], seconds: float) -> None:
        """Note the results of a step, by rank, and its duration."""
        if self._snapshots.pace is not None:
            world = self._loaded.world
            self._snapshots.pace.learn(results, seconds, [world.label(rank) for rank in range(world.size)])

    def is_due(self) -> bool:
        """Return whether the run is to go on with other actors: with more replicas, or away from nodes taken away.

        It looks from time to time. Of a node that is taken away, the first half of the time that is left is for others
        to come.
        """
        self._heed_notices()
        actors, left = self._lifetime.actors, self._left
        if self._is_driver_left:
            return self._may_end()
        if self._layout is self._layouts.whole and not left:
            return False
        if left and not takes_snapshots(self.run) and self.run.folder is None:
            return self._may_end()
        if left or time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _LOOK
            actors.look()
        largest = self._layouts.largest(actors.present)
        if not left:
            return largest is not self._layout
        if largest is not None and largest.run.mesh.dp >= self._layout.run.mesh.dp:
            return True
        if not self._notices.is_urgent and actors.hoped():
            return False
        return largest is not None or self._may_end()

    def why_end(self) -> str:
        """Return why the run can't go on, now that it is due to go on with other actors; "" if it can."""
        if self._is_driver_left:
            return f"{self._notices} is taken away, and the driver is on it"
        if self._left and self._layouts.largest(self._lifetime.actors.present) is None:
            who, room = " and ".join(map(self._loaded.world.label, self._left)), why_no_room(self._lifetime.actors)
            return f"{self._notices} is taken away, {room} in the place of {who}, and {self._layouts.why_none()}"
        return ""

    def rearrange(self, step: int, found: Found | None = None) -> int:
        """Go on with more replicas, or away from nodes that are taken away. No step is lost.

        Args:
            step: Number of steps taken.
            found: A checkpoint of this step; None where snapshots are taken.

        Returns:
            The number of steps taken that the run goes on after.

        Raises:
            JobError: It failed; the run can be recovered.
        """
        start, loaded, before, left = time.monotonic(), self._loaded, self._layout, self._left
        actors, size = self._lifetime.actors, self._loaded.world.size
        actors.demand_answers(size, f"{self._job} spare")
        layout = self._layouts.largest(actors.present)
        if layout is None or (layout is before and not left):
            return step
        if takes_snapshots(loaded.run):
            loaded.calls.all("begin_snapshots", step, what="taking snapshots")
        loaded.calls.all("leave", True, what="leaving groups")
        self._seat(layout, [rank for rank in range(size) if rank not in left])
        back_to, _ = self._again(step, found)
        whole, dp = self._layouts.whole, layout.run.mesh.dp
        who = [loaded.world.label(rank) for rank in left]
        how = f"with dp={dp} of {whole.run.mesh.dp}"
        if left:
            what = "the run has moved"
            how = f"with {self._size_told(who)}" if dp < before.run.mesh.dp else f"with {' and '.join(who)} elsewhere"
        else:
            what = "the run is whole again" if layout is whole else "the run has grown"
        log.warning("%s after step %d, %s, in %.1f s", what, step, how, time.monotonic() - start)
        actors.dismiss(layout.world.size)
        return back_to

    @property
    def _left(self) -> list[int]:
        """The ranks whose actors are on nodes that are taken away."""
        return [rank for rank in range(self._loaded.world.size) if not self._lifetime.actors.stays(rank)]

    @property
    def _is_driver_left(self) -> bool:
        """Whether the driver's own node is taken away."""
        return bool(self._notices.names) and own_node() in self._notices.names

    def _may_end(self) -> bool:
        """Return whether the run can be saved, and so may end before its nodes do; warn once if it can't."""
        if self.run.folder is None and not self._stays_told:
            self._stays_told = True
            log.warning("the run goes on there until then: it has no folder to be saved in")
        return self.run.folder is not None

    def _heed_notices(self) -> None:
        """Look for nodes that are taken away, and let others start in the place of actors there."""
        if not self._notices.look():
            return
        actors = self._lifetime.actors
        actors.leave(self._notices.names, f"{self._job} spare")
        actors.dismiss(self._loaded.world.size)

    def save_snapshots(self, taken: int) -> Path | None:
        """Save what the actors of a run that ends have in memory; see ``last_checkpoint``."""
        if self._lifetime.failure is not None or not self._lifetime.actors.reachable():
            return None
        return last_checkpoint(self.run, self._loaded.calls, self._snapshots, taken)

    def close(self) -> None:
        """Let go of the snapshots. A second call does nothing."""
        self._snapshots.close()

    @property
    def _others(self) -> Calls:
        """Calls to the actors that have no rank."""
        world, timeout = self._loaded.world, self._loaded.run.timeout
        return Calls(self._lifetime.actors.handles[world.size :], world, timeout)

    def _clear(self, seconds: float) -> list[int]:
        """Make the actors leave their groups. Returns those that are dead or do not get free in so many seconds."""
        calls, world = self._loaded.calls, self._loaded.world
        calls.abort()
        everyone = range(world.size)
        alive = calls.answers(everyone, "progress", seconds=_HEARD, group="ctl")
        free = calls.answers(alive, "leave", True, seconds=seconds)
        return [rank for rank in everyone if rank not in free]

    def _replace(self, gone: Sequence[int]) -> None:
        """Put other actors in the place of these, or go on with fewer replicas.

        Raises:
            NoRoomError: There are too few actors, and no others start on any node.
        """
        actors, world = self._lifetime.actors, self._loaded.world
        if not gone:
            return
        for rank in gone:
            self._witnesses.kill(rank)
            actors.vacate(rank, f"{self._job} {world.label(rank)}")
        actors.demand_answers(world.size, f"{self._job} spare")
        actors.wait_for(max(world.size, self._layouts.whole.world.size))
        who = " and ".join(world.label(rank) for rank in gone)
        self.awaits_room = True
        layout = self._layouts.largest(actors.present) or room_awaited(actors, self._layouts, who)
        self.awaits_room = False
        if layout is None:
            raise no_room(actors, self._layouts, who)
        self._seat(layout, [rank for rank in range(world.size) if actors.stays(rank)])

    def _seat(self, layout: Layout, present: Sequence[int]) -> None:
        """Give the ranks of a layout to actors.

        Args:
            layout: The layout.
            present: The ranks of the present layout whose actors are there, and stay.
        """
        actors, world = self._lifetime.actors, self._loaded.world
        others = [number for number in range(world.size, len(actors.handles)) if actors.stays(number)]
        actors.seat(seats_of(world, layout.world, present, others))
        if layout is self._layout:
            for rank in range(world.size):
                self._loaded.calls.replace(rank, actors.handles[rank])
            return
        self._layout, self._number = layout, self._number + 1
        self._loaded = loaded_on(self._lifetime, layout.run, layout.programs, self._loaded.skeleton)

    def _again(self, taken: int, found: Found | None = None) -> tuple[int, str]:
        """Start the run again on its actors. Returns after which step it goes on, and where its state is from.

        Args:
            taken: Number of steps that the driver has reports of. Actors may have taken another one.
            found: The checkpoint to go back to if there are no snapshots; None for the newest.
        """
        loaded, others = self._loaded, self._others
        found = found or self._newest()
        saved = 0 if found is None else found.manifest.step
        holds = self._join(None, _unguarded)
        steps = self._snapshots.share(loaded, others)
        common = self._snapshots.common(steps, taken)
        from_memory = common is not None and common >= saved
        if common is not None and from_memory:
            self._snapshots.restore(loaded, others, steps, common, self._places)
        elif found is not None:
            if not found.path.exists():
                raise JobError(
                    f"the run began with {found.path}, which is there no more: nothing is left to go back to"
                )
            loaded.load(found)
        back_to = common if common is not None and from_memory else saved
        self._begin(back_to)
        if loaded is not self._told:
            self._told = loaded
            self._moved(loaded, holds)
        return back_to, "memory" if from_memory else "" if found is None else found.path.name

    def _newest(self) -> Found | None:
        """Return the newest checkpoint of the run, or else the one that it began with."""
        folder = self._loaded.run.folder
        saved = None if folder is None else newest(absolute(folder) / CHECKPOINTS)
        return saved or self._found

    def _join(self, found: Found | None, guard: Guard) -> Holds:
        """Make the actors join new groups and build the run, and load a checkpoint if there is one."""
        self._generation += 1
        loaded, named = self._loaded, (self._job, self._generation, self._device)
        run = loaded.run if self._found is None else begun(loaded.run)
        plans = plans_of(run, self._layout.programs, *named, self._faults, self._number)
        holds = loaded.start(plans, found, guard, again=guard is _unguarded)
        located = loaded.calls.answers(range(loaded.world.size), "located", seconds=_HEARD, group="ctl")
        self._places = [located[rank].place if rank in located else "" for rank in range(loaded.world.size)]
        homes, here = self._lifetime.actors.homes, place()
        elsewhere = {rank: homes[rank].where() for rank, at in located.items() if at.place != here}
        self._witnesses.know({rank: at for rank, at in located.items() if at.place}, elsewhere)
        align(loaded.calls, located)
        return holds

    def _begin(self, step: int) -> None:
        self._snapshots.begin(self._loaded, self._number, self._others, step, self._places)


def _unguarded(call: Callable[[], list[Any]]) -> list[Any]:
    """Call without ending the job at a failure: another recovery follows."""
    return call()
