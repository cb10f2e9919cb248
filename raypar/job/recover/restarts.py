"""Start a run on a job's actors, and again after a failure: with replacements of those that failed, or with fewer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from raypar.actors.specs.results import StepResult
from raypar.actors.specs.run import Run
from raypar.checkpoint.find import VerifiedCheckpoint
from raypar.cluster.interrupts import impatience
from raypar.cluster.lifecycle.actors import Actors
from raypar.cluster.lifecycle.ray_cluster import free_cpus_text
from raypar.cluster.lifecycle.replacement_actors import nodes_of
from raypar.cluster.nodes.drain_notices import DrainNotices
from raypar.cluster.nodes.nodes import own_node
from raypar.config.schedule import Programs
from raypar.errors import JobError, NoRoomError, RayLostError
from raypar.job.layout.elastic import Layout, Layouts
from raypar.job.layout.other_layout import state_copy_faults
from raypar.job.recover.active_layout import ActiveLayout
from raypar.job.recover.failures import Failure, Failures, death_in, failure_line, failure_reason
from raypar.job.recover.relayout import rebuilt
from raypar.job.recover.snapshots import last_checkpoint, takes_snapshots
from raypar.job.recover.stops import Stops
from raypar.job.start.lifetime import HEARD, Lifetime
from raypar.job.start.loaded_run import Holds, LoadedRun

log = logging.getLogger(__name__)
_FREE = 5.0  # seconds in which an actor whose groups were aborted gets out of its step
_JOINING = 1.0  # the same of an actor that joins groups, which it does not leave as long as others may come
_NAMED = 4  # lost actors that a message names
_LOOK = 5.0  # seconds between two checks for free resources for missing actors


def wait_for_new_nodes(actors: Actors, layouts: Layouts, who: str) -> Layout | None:
    """Wait for nodes with room for actors without which a run can't go on, as long as the launch said (wait_for_nodes).

    A Ctrl-C or SIGTERM ends the wait, and with it the job.

    Args:
        actors: The job's actors.
        layouts: The layouts in which the run can go on.
        who: The actors that are lost.

    Returns:
        The layout with the most replicas for which there are enough actors; None if there is none.
    """
    wait, layout = actors.wait_for_nodes, None
    if actors.hoped(wait):
        log.warning("%s: the run waits up to %g s in all for room for %s", why_no_room(actors), wait, who)
    with impatience():
        while layout is None and actors.wait_for_actors(actors.present + 1, wait):
            layout = layouts.largest(actors.present)
    return layout


def why_no_room(actors: Actors) -> str:
    """Return the reason why no other actor starts."""
    if any(one.has_room for one in actors.pending):
        return "no other actor starts"
    free = free_cpus_text()
    return f"no node has room for another actor ({free})" if free else "no node is left for another actor"


def no_room_error(actors: Actors, layouts: Layouts, who: str) -> NoRoomError:
    """Return the error of a run for which no other actors come, with what would have helped.

    Args:
        actors: The job's actors.
        layouts: The layouts in which the run can go on.
        who: The actors that are lost.
    """
    error = NoRoomError(f"{why_no_room(actors)} in the place of {who}, and {layouts.why_none()}")
    error.add_note(_what_helps(layouts.whole.run, actors.wait_for_nodes))
    return error


def _what_helps(run: Run, waited: float) -> str:
    """Return advice on options with which a run survives the loss of nodes, or loses less by it."""
    text = f"Where nodes come back, wait_for_nodes (--wait-for-nodes), which was {waited:g} s, lets a run wait for them"
    if run.folder is None:
        text += "; in a folder (--folder) it is saved, also at its end, from what is left in memory"
    elif not run.save_every:
        text += "; save_every (--save-every) keeps checkpoints on the disk, whatever is lost"
    return f"{text}."


class Restarts:
    """Starts runs on a job's actors.

    Args:
        lifetime: The life of the job's actors.
        job: The job's name.
        active: The active layout of the run.

    Attributes:
        active: The same.
        failures: The failures of the run.
        awaits_room: Whether it waits for nodes, or was interrupted while it did: then nothing else is under way.
    """

    def __init__(self, lifetime: Lifetime, job: str, active: ActiveLayout) -> None:
        self._lifetime, self._job = lifetime, job
        self.active = active
        self._next_look, self._notices, self._is_stay_logged = 0.0, DrainNotices(lifetime.server), False
        self.failures, self.awaits_room = Failures(0), False

    def start(self, loaded: LoadedRun, programs: Programs, found: VerifiedCheckpoint | None) -> Holds:
        """Make the actors build a run, and load a checkpoint if there is one.

        Args:
            loaded: The run.
            programs: Its lowered schedules.
            found: The checkpoint; None for a new run.

        Returns:
            By rank, the shard that the rank holds of each of its logical parameters.
        """
        self.active.load(loaded, Layouts(Layout(loaded.run, programs), loaded.skeleton), found)
        self.failures = Failures(loaded.run.max_failures)
        here, bundles = own_node(), self._lifetime.actors.bundles[: loaded.world.size]
        self._lifetime.witnesses.attend({*nodes_of(bundles)} - {here, ""})  # they start while the actors do
        with self._lifetime.guarded(patient=False):
            holds = self.active.join(found)
            self.active.share()
            self.active.begin(0 if found is None else found.manifest.step)
        return holds

    @property
    def run(self) -> Run:
        """The run, with all its replicas."""
        return self.active.layouts.whole.run

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
        reason, death, before = failure_reason(error), death_in(error), self.active.layout
        while True:
            if not isinstance(error, RayLostError) and not self._lifetime.server.answers():
                why = self.why_lost() or "Ray's control server does not answer"
                raise RayLostError(f"{reason}; {why}") from error
            self._heed_notices()
            self.failures.count(step, error, is_foreseen=getattr(error, "rank", None) in self._left)
            log.warning("%s", failure_line(error))
            ranks = self._clear(_JOINING if gone else _FREE)
            gone += [self.active.loaded.world.label(rank) for rank in ranks]
            try:
                self._replace(ranks)
                back_to, source = self.active.again(step - 1)
                self._lifetime.actors.dismiss(self.active.layout.world.size)
            except NoRoomError as end:
                end.add_note(f"It was lost so: {reason}.")
                raise
            except JobError as next_error:
                error = next_error
                continue
            break
        size = self._size_text(gone) if self.active.layout.world.mesh.dp < before.world.mesh.dp else ""
        replaced, seconds = () if size else tuple(dict.fromkeys(gone)), time.monotonic() - start
        failure = Failure(step, reason, replaced, back_to, source, seconds, lost(back_to), death, size=size)
        self.failures.survived.append(failure)
        log.warning("%s", failure)
        return failure

    def rebuild(self, step: int, error: JobError) -> None:
        """Build the run anew on its actors after an error of a call that has changed no weight.

        Args:
            step: Number of steps taken.
            error: The error, which is raised if the run does not go on: if an actor has died or waits, if the steps of
                its schedule overlap, or if there is too little memory for a copy of its state.
        """
        active, actors = self.active, self._lifetime.actors
        calls, everyone = active.loaded.calls, range(active.layout.world.size)
        if type(error) is not JobError or active.loaded.schedule.stream:
            raise error
        if any(state_copy_faults(active.layout, active.layout, active.loaded.skeleton)):
            raise error
        calls.abort()
        if len(calls.answers(everyone, "progress", seconds=_FREE)) < len(everyone):
            raise error
        try:
            rebuilt(active, actors, step)
        except JobError as next_error:
            log.warning("%s", failure_reason(next_error))
            raise error from None
        log.warning("%s; no weight was changed, and the job goes on after step %d", failure_reason(error), step)

    def _size_text(self, lost: Sequence[str]) -> str:
        """Return in words with how many replicas the run goes on, and without which actors."""
        run, whole = self.active.layout.run, self.run
        each, who = f"{run.microbatches} microbatches each instead of {whole.microbatches}", [*dict.fromkeys(lost)]
        more = f" and {len(who) - _NAMED} more" if len(who) > _NAMED else ""
        return f"dp={run.mesh.dp} instead of {whole.mesh.dp}, {each}, without {' and '.join(who[:_NAMED])}{more}"

    def go_on_after(self, step: int) -> int:
        """Begin snapshots anew where the actors have gone back to a step by themselves, and return that step.

        Raises:
            JobError: It failed; the run can be recovered.
        """
        self.active.share()
        self.active.begin(step)
        return step

    def copy_due(self, step: int) -> int:
        """Return in how many steps a copy of the snapshots after a step should be on other nodes; 0: there is none."""
        return 0 if self.active.snapshots.pace is None else self.active.snapshots.pace.within(step)

    def learn(self, results: Sequence[StepResult], seconds: float) -> None:
        """Note the results of a step, by rank, and its duration."""
        if self.active.snapshots.pace is not None:
            world = self.active.loaded.world
            self.active.snapshots.pace.learn(results, seconds, [world.label(rank) for rank in range(world.size)])

    def is_due(self) -> bool:
        """Return whether the run is to go on with other actors: with more replicas, or away from nodes taken away.

        It looks from time to time. Of a node that is taken away, the first half of the time that is left is for others
        to come.
        """
        if self._lifetime.server.why_lost():
            return True
        self._heed_notices()
        actors, left = self._lifetime.actors, self._left
        if self._is_driver_left:
            return self._may_end()
        if self.active.layout is self.active.layouts.whole and not left:
            return False
        if left and not takes_snapshots(self.run) and self.run.folder is None:
            return self._may_end()
        if left or time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _LOOK
            actors.look()
        largest = self.active.layouts.largest(actors.present)
        if not left:
            return largest is not self.active.layout
        if largest is not None and largest.run.mesh.dp >= self.active.layout.run.mesh.dp:
            return True
        if not self._notices.is_urgent and actors.hoped():
            return False
        return largest is not None or self._may_end()

    def why_lost(self) -> str:
        """Return why Ray is lost; "" if it is not."""
        return self._lifetime.server.why_lost()

    def why_end(self) -> str:
        """Return why the run can't go on, now that it is due to go on with other actors; "" if it can."""
        if self._is_driver_left:
            return f"{self._notices} is taken away, and the driver is on it"
        if self._left and self.active.layouts.largest(self._lifetime.actors.present) is None:
            who = " and ".join(map(self.active.loaded.world.label, self._left))
            room = why_no_room(self._lifetime.actors)
            return f"{self._notices} is taken away, {room} in the place of {who}, and {self.active.layouts.why_none()}"
        return ""

    def rearrange(self, step: int, found: VerifiedCheckpoint | None = None) -> int:
        """Go on with more replicas, or away from nodes that are taken away. No step is lost.

        Args:
            step: Number of steps taken.
            found: A checkpoint of this step; None where snapshots are taken.

        Returns:
            The number of steps taken that the run goes on after.

        Raises:
            JobError: It failed; the run can be recovered.
        """
        start, left = time.monotonic(), self._left
        loaded, before = self.active.loaded, self.active.layout
        actors, size = self._lifetime.actors, self.active.loaded.world.size
        actors.demand_answers(size, f"{self._job} spare")
        layout = self.active.layouts.largest(actors.present)
        if layout is None or (layout is before and not left):
            return step
        if takes_snapshots(loaded.run):
            loaded.calls.all("begin_snapshots", step, what="taking snapshots")
        loaded.calls.all("leave", True, what="leaving groups")
        self.active.assign(layout, [rank for rank in range(size) if rank not in left])
        back_to, _ = self.active.again(step, found)
        whole, dp = self.active.layouts.whole, layout.run.mesh.dp
        who = [loaded.world.label(rank) for rank in left]
        how = f"with dp={dp} of {whole.run.mesh.dp}"
        if left:
            what = "the run has moved"
            how = f"with {self._size_text(who)}" if dp < before.run.mesh.dp else f"with {' and '.join(who)} elsewhere"
        else:
            what = "the run is whole again" if layout is whole else "the run has grown"
        log.warning("%s after step %d, %s, in %.1f s", what, step, how, time.monotonic() - start)
        actors.dismiss(layout.world.size)
        return back_to

    @property
    def _left(self) -> list[int]:
        """The ranks whose actors are on nodes that are taken away."""
        return [rank for rank in range(self.active.loaded.world.size) if not self._lifetime.actors.stays(rank)]

    @property
    def _is_driver_left(self) -> bool:
        """Whether the driver's own node is taken away."""
        return bool(self._notices.names) and own_node() in self._notices.names

    def _may_end(self) -> bool:
        """Return whether the run can be saved, and so may end before its nodes do; warn once if it can't."""
        if self.run.folder is None and not self._is_stay_logged:
            self._is_stay_logged = True
            log.warning("the run goes on there until then: it has no folder to be saved in")
        return self.run.folder is not None

    def _heed_notices(self) -> None:
        """Look for nodes that are taken away, and let replacements of the actors there start."""
        if self.why_lost() or not self._notices.look():
            return
        actors = self._lifetime.actors
        actors.leave(self._notices.names, f"{self._job} spare")
        actors.dismiss(self.active.loaded.world.size)

    def lacks_copies(self, stops: Stops) -> bool:
        """Return whether a run that is stopped in a step could be saved only with copies, and takes none."""
        return not self.active.snapshots.are_taken(self.run) and stops.need_copies()

    def keep_copies(self, stops: Stops, step: int) -> None:
        """Make the actors take snapshots from now on, if there is room for them.

        Args:
            stops: Knows what they take.
            step: Number of steps taken, after which the first is.
        """
        if stops.has_room({*nodes_of(self._lifetime.actors.bundles)}):
            self.active.keep_snapshots(step)

    def saves_at_once(self) -> bool:
        """Return whether a run that is stopped in the middle of a step can be saved as it was before."""
        return self.run.folder is not None and self.active.snapshots.are_taken(self.run)

    def save_snapshots(self, taken: int) -> Path | None:
        """Save what the actors of a run that ends have in memory; see ``last_checkpoint``."""
        if self._lifetime.failure is not None or not self._lifetime.actors.reachable():
            return None
        return last_checkpoint(self.run, self.active.loaded.calls, self.active.snapshots, taken)

    def close(self) -> None:
        """Let go of the snapshots. A second call does nothing."""
        self.active.snapshots.close()

    def _clear(self, seconds: float) -> list[int]:
        """Make the actors leave their groups. Returns those that are dead or do not get free in so many seconds."""
        calls, world = self.active.loaded.calls, self.active.loaded.world
        calls.abort()
        everyone = range(world.size)
        alive = calls.answers(everyone, "progress", seconds=HEARD, group="ctl")
        free = calls.answers(alive, "leave", True, seconds=seconds)
        return [rank for rank in everyone if rank not in free]

    def _replace(self, gone: Sequence[int]) -> None:
        """Replace actors, or go on with fewer replicas.

        Raises:
            NoRoomError: There are too few actors, and no others start on any node.
        """
        actors, world = self._lifetime.actors, self.active.loaded.world
        if not gone:
            return
        for rank in gone:
            self._lifetime.witnesses.kill(rank)
            actors.replace_actor(rank, f"{self._job} {world.label(rank)}")
        actors.demand_answers(world.size, f"{self._job} spare")
        actors.wait_for_actors(max(world.size, self.active.layouts.whole.world.size))
        who = " and ".join(world.label(rank) for rank in gone)
        self.awaits_room = True
        layout = self.active.layouts.largest(actors.present) or wait_for_new_nodes(actors, self.active.layouts, who)
        self.awaits_room = False
        if layout is None:
            raise no_room_error(actors, self.active.layouts, who)
        self.active.assign(layout, [rank for rank in range(world.size) if actors.stays(rank)])
