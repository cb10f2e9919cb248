"""The training loop: hand steps to the actors, commit their reports, save checkpoints when they are due."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from raypar.actors.errors import CheckpointError, NonFiniteError
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind, format_watched
from raypar.cluster.interrupts import CtrlC, patience
from raypar.errors import CallError, JobError, MovedError
from raypar.job.recover.background_save import Saver
from raypar.job.recover.failures import Failure
from raypar.job.recover.planned_moves import rearranged, rewound
from raypar.job.recover.restarts import Restarts
from raypar.job.recover.stops import Stops
from raypar.job.start.lifetime import Lifetime
from raypar.job.start.loaded_run import Holds, LoadedRun
from raypar.job.stepping.stepper import Stepper
from raypar.job.steps.averages import with_averages
from raypar.job.steps.displayed import Callback, displayed
from raypar.job.steps.evaluation import Evaluations
from raypar.job.steps.steps_ahead import StepsAhead, steps_to_take
from raypar.job.steps.steps_by_hand import StepsByHand
from raypar.paths import absolute, checkpoints_in, step_folder_name
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.profiles import ProfiledSteps
from raypar.reporting.record import Record
from raypar.reporting.report import Report, reports_of
from raypar.reporting.report_table import Reports
from raypar.reporting.step_times import StepTimes, Stragglers

T = TypeVar("T")

log = logging.getLogger(__name__)
_SAVE_SECONDS = 10.0  # that a save under way gets to complete, after a failure


class TrainingLoop:
    """Takes the training steps of a job's run, with the evaluations and checkpoints that are due.

    Args:
        lifetime: The life of the job's actors.
        device: Device that the actors compute on.
        loaded: The run.
        record: Record of the run's reports and evaluations.
        starter: Brings the run back after a failure, and lets it go on with other actors.

    Attributes:
        loaded: The run.
        saver: Saves its checkpoints.
        holds: By rank, the shard that the rank holds of each of its logical parameters.
        next_step: Number of the next step, counted from 0: the number of steps taken.
        last: Report of the latest step; None before the first.
        is_averaged: Whether text is generated with the averages of the weights.
    """

    def __init__(
        self, lifetime: Lifetime, device: DeviceKind, loaded: LoadedRun, record: Record, starter: Restarts
    ) -> None:
        self._lifetime, self._starter, self._hand = lifetime, starter, StepsByHand(device)
        self._training, self._generating = threading.RLock(), threading.Lock()  # the first: while a thread takes steps
        self._ahead: StepsAhead | None = None
        self.last: Report | None = None
        self.is_averaged = False
        self.exchange(loaded, record)

    def exchange(self, loaded: LoadedRun, record: Record) -> None:
        """Replace the run by another one, from its first step. The present one must be closed already."""
        self._hand.forget()
        self.loaded, self.next_step, self.last = loaded, 0, None
        self.holds: Holds = ()
        self._record, self.saver = record, Saver(loaded.run, loaded.calls)
        self._stragglers, self._times = Stragglers(loaded.world), StepTimes()
        self._stops = Stops(loaded)
        self._evaluations, self._is_finished = Evaluations(loaded.run), False
        self._profiled = ProfiledSteps(loaded.run)

    def move(self, loaded: LoadedRun, holds: Holds, run: Run | None = None) -> None:
        """Go on in another layout, between two steps, as another run if there is one."""
        self.loaded, self.holds, self._evaluations.run = loaded, holds, loaded.run
        self.saver.move(loaded.calls, run)
        self._record.move(loaded.run, loaded.schedule, self.next_step, loaded.skeleton, is_other=run is not None)
        self._stragglers, self._stops = Stragglers(loaded.world), Stops(loaded)
        self._profiled.report()
        self._profiled = ProfiledSteps(loaded.run)

    def leave(self, folder: str | None) -> None:
        """Finish the run if its folder is this one, in which another run is to go on: it has one writer at a time."""
        if folder is not None and folder == self.loaded.run.folder:
            self.finish()

    def unlocked(self) -> AbstractContextManager[None]:
        """Complete the save under way, and return a context in which another run may take the run's folder."""
        self.saver.settle()
        return self._record.unlocked()

    def finish(self) -> None:
        """Keep the latest step's times, then end the saving and the record of the run. A second call does nothing."""
        if not self._is_finished:
            self._is_finished = True
            self.keep_times()
            self.close()

    def begin(self, holds: Holds, step: int, name: str) -> None:
        """Start the run's record, once the actors have built the run.

        Args:
            holds: By rank, the shard that the rank holds of each of its logical parameters.
            step: Number of the first step to take.
            name: The job's name.
        """
        self.next_step, self.holds, loaded = step, holds, self.loaded
        self._record.begin(loaded.run, loaded.schedule, step, name, loaded.skeleton)
        if self.loaded.run.early_stop:
            self._evaluations.begin(self._record.validation_losses(self.loaded.run, step))

    def step(self) -> Report:
        """Take one compiled training step, as ``Job.step`` does."""
        with closing(self._steps(1, 0)) as outcomes:
            report = next(outcomes)
            self._save_due()
            assert isinstance(report, Report)
            return report

    def train(self, steps: int | None, on: Callback | Sequence[Callback] | None, ahead: int | None) -> Reports:
        """Take training steps with a progress display, as ``Job.train`` does, and return their reports."""
        most = int(on is None) if ahead is None else ahead
        self._lifetime.demand_open()  # before anything is displayed
        run = self.loaded.run
        count = steps_to_take(run, self.next_step, steps)
        try:
            with closing(self._steps(count, most)) as outcomes:
                return displayed(run, self.next_step + count, outcomes, on)
        except (KeyboardInterrupt, SystemExit, CallError) as error:  # Ctrl-C, SIGTERM, an evaluation that failed
            self.keep(error)
            raise

    def evaluate(self, steps: int | None = None, *, ema: bool = False) -> Evaluation:
        """Compute the loss on validation data, as ``Job.evaluate`` does. That of averaged weights is not recorded."""
        self.demand_ready()

        def step(number: int) -> list[Any]:
            calls = self.loaded.calls
            with with_averages(calls, ema=ema):
                return calls.all("run", "evaluate", number, what=f"evaluation step {number + 1}")

        def take(number: int) -> list[Any]:
            return self._after_this_step(lambda: self._alone(partial(step, number), averaged=ema))

        evaluation = self._evaluations.take(self.next_step, steps, take, ema=ema)
        if not ema:
            self._record.write(evaluation)
        return evaluation

    def save(self, folder: Path, keep_last: int | None) -> Path:
        """Save a checkpoint now and return its path, as ``Job.save`` does. Raises CheckpointError."""
        self._demand_alive("saving a checkpoint")
        with self._lifetime.guarded():
            return self.saver.save(folder, self.next_step, keep_last)

    def keep(self, error: BaseException) -> None:
        """Save a checkpoint of a run that is stopped, if it has a folder and its actors can still be called.

        Args:
            error: What stops it. It gets a note that says how the run goes on.
        """
        run, step = self.loaded.run, self.next_step
        if run.folder is None or not step or self._lifetime.failure is not None:
            return
        folder = checkpoints_in(absolute(run.folder))
        if self.saver.newest != folder / step_folder_name(step):
            try:
                saved = self.save(folder, run.keep_last)
            except (CheckpointError, JobError) as fault:
                log.warning("interrupted, and nothing was saved: %s", fault)
                return
            log.warning("saved as %s", saved.name)
        self._lifetime.note(error)

    def copy_weights(self, folder: Path, *, ema: bool) -> Path:
        """Save the weights alone, or their averages, as a checkpoint and return its path. Raises CheckpointError."""
        self._demand_alive("an export")
        with self._lifetime.guarded(), with_averages(self.loaded.calls, ema=ema):
            return self.saver.copy_weights(folder, self.next_step)

    def stepper(self) -> Stepper:
        """Return a Stepper for the next training step; the same one if that step has already begun."""
        self._lifetime.demand_open()
        if (begun := self._hand.begun()) is not None:
            return begun
        self._demand_alive("a step by hand")
        return self._hand.open(
            self.loaded, self.next_step, self._by_hand, lambda *taken: self._commit(*taken, by_hand=True)[-1]
        )

    def between_steps(self, call: Callable[[], T], what: str) -> T | Failure:
        """Call the actors between two steps; return a failure that the run has survived. Raises JobError."""
        self._demand_alive(what)
        with self._exclusively(f"ask for {what} when it has taken them"):
            self.keep_times()
            self.saver.settle()
            self._ahead = None
            with self._guarded():
                return call()
            return self._survived

    @contextmanager
    def generating(self, call: str, *, ema: bool = False) -> Iterator[None]:
        """Generate text in this context.

        Args:
            call: What the user has called, for the message.
            ema: Whether the actors compute with the averages of the weights meanwhile.

        Raises:
            JobError: Another call generates text.
        """
        if not self._generating.acquire(blocking=False):
            raise JobError(f"this job is generating text: call {call} again when it has returned")
        try:
            self.is_averaged = ema
            yield
        finally:
            self.is_averaged = False
            self._generating.release()

    def demand_ready(self) -> None:
        """Raise JobError if the job is over, or in the middle of a step."""
        self._lifetime.demand_open()
        self._hand.demand_over()
        if self._num_ahead:
            raise JobError("train has handed over steps ahead: do this when it has returned, or train with ahead=0")
        if self.is_averaged:
            raise JobError("the actors compute with averaged weights: do this when generate has returned")

    def keep_times(self, *, profiled: bool = False) -> None:
        """Write the latest step's times to the run's folder in the background, if the actors can still be called.

        Args:
            profiled: Whether to keep them beside the profile of the step as well.
        """
        if (step := self._record.unmeasured()) is not None:
            with suppress(JobError):
                self.demand_ready()
                keep = partial(self._record.measured, step, self.loaded.schedule, self.loaded.world, profiled=profiled)
                self.saver.ask(("events", "ledger"), keep)

    def close(self, hurried: bool = False) -> None:
        """End the saving and the record of the run. ``hurried`` gives up a slow save, after a failure."""
        try:
            self.saver.close(hurried=hurried)
        finally:
            self._profiled.report()
            self._record.close()

    # --- the steps ---

    def _steps(self, count: int, most: int) -> Generator[Report | Evaluation]:
        """Take steps, and yield their reports and the evaluations that are due.

        Args:
            count: Number of steps.
            most: How many of them the actors get before the report of the current one has arrived.
        """
        with self._exclusively("take them all in one"):
            self.demand_ready()
            last, self._ahead = self.next_step + count, None
            with self._completing():
                while self.next_step < last:
                    ahead, stop = self._next_steps(most, last)
                    reports = list[Report]()
                    with self._patience(ahead) as ctrl_c, self._rewinding(), self._guarded():
                        ahead.hand_over(self.next_step, stop)
                        reports = self._commit(*ahead.collect())
                        while ctrl_c.has_come and len(ahead):  # what is displayed last is what is saved
                            reports += self._commit(*ahead.collect())
                    try:
                        yield from reports
                    finally:
                        ctrl_c.heed()
                    if not reports:
                        continue  # the run has gone back
                    self._save_due()
                    if self._evaluations.is_due(self.next_step):
                        yield (evaluation := self.evaluate())
                        if self._ends_with(evaluation):
                            break

    def _next_steps(self, most: int, last: int) -> tuple[StepsAhead, int]:
        """Let the run go on with other actors, or with copies of its state, if that is due.

        Args:
            most: See ``_steps``.
            last: Number of the first step that is not taken now.

        Returns:
            What hands over the next steps, and the number of the first step that it must not hand over yet.
        """
        self._lifetime.demand_open()
        is_due = self._starter.is_due()
        if is_due and not self._num_ahead:
            with self._guarded():
                self.saver.settle()
                self.next_step = rearranged(self._starter, self.saver, self.loaded.run, self.next_step)
            self._ahead = None
        if (lacks_copies := self._starter.lacks_copies(self._stops)) and not self._num_ahead:
            with self._guarded():
                self._starter.keep_copies(self._stops, self.next_step)
        if self._ahead is None:  # it is the first step, or the layout has changed
            self._ahead = self._handing(most)
        if (is_due or lacks_copies) and self._num_ahead:
            return self._ahead, self.next_step + self._num_ahead  # the actors complete what they have
        stop = self._evaluations.next_due(self.next_step, last)
        if not self.loaded.schedule.stream:  # else no step is ahead, and a stream is one call
            stop = self._profiled.next_due(self.next_step, stop)
        return self._ahead, min(stop, self.saver.next_due(self.next_step, last))

    def _handing(self, most: int) -> StepsAhead:
        return StepsAhead.of(self.loaded, most, self._lifetime.epoch, self._starter.copy_due)

    @property
    def _num_ahead(self) -> int:
        """Number of steps that the actors have and that are not reported."""
        return 0 if self._ahead is None else len(self._ahead)

    def _save_due(self) -> None:
        with self._lifetime.guarded():
            if self.saver.due(self.next_step):
                self.keep_times()
            self.saver.after(self.next_step)

    def _ends_with(self, evaluation: Evaluation) -> bool:
        """Return whether the training ends with an evaluation, before its last step; if so, save the run."""
        if why := self._evaluations.keep(evaluation):
            log.warning("%s", why)
            if not self.saver.due(self.next_step):
                with self._lifetime.guarded():
                    self.saver.after(self.next_step, is_last=True)
        return bool(why)

    def _commit(self, results: list[Any], seconds: float, *, by_hand: bool = False) -> list[Report]:
        """Count the steps that every actor has reported now: one, or those that overlap. Record their reports."""
        watched = format_watched(self.loaded.run.overflow_format, self.loaded.run.precision.layers)
        found = reports_of(self.next_step, seconds, results, self.loaded.world, by_hand=by_hand, watched=watched)
        reports = [report.rated(self._starter.active.utilisation) for report in found]
        if not by_hand:
            self._stragglers.warn(reports[-1].steps_taken, [result.busy for result in results])
        self._starter.learn(results, seconds)
        for report in reports:
            self._times.keep(self.next_step, report.step_ms / 1e3)
            self._stops.learn(report.step_ms / 1e3)
            self.next_step += 1
            self.last = report
            self._record.write(report)
        if self._profiled.note([report.steps_taken for report in reports], results, self.loaded.world):
            self.keep_times(profiled=True)
        return reports

    # --- failures, signals, rewinds ---

    @contextmanager
    def _exclusively(self, otherwise: str) -> Iterator[None]:
        """Let no other thread take steps. Raises JobError, with the advice ``otherwise``, if one does."""
        if not self._training.acquire(blocking=False):
            raise JobError(f"another thread is taking steps of this job: {otherwise}")
        try:
            yield
        finally:
            self._training.release()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Call the actors in this context. After a failure the run is brought back, and goes on after the context.

        Raises:
            JobError: It can't be brought back.
            CallError: A call that changes no weight failed on actors that live.
        """
        start = time.perf_counter()
        with self._lifetime.guarded():
            try:
                yield
            except CallError:
                raise
            except (KeyboardInterrupt, SystemExit):  # in the middle of a step
                self._save_last()
                raise
            except JobError as error:
                self._recover(error, start)

    def _recover(self, error: JobError, start: float) -> None:
        """Bring the run back after a failure of a call that began at ``start``. Raises JobError if that is too late."""
        self.saver.settle(_SAVE_SECONDS)
        step, lost = self.next_step + 1, partial(self._times.lost, start)
        try:
            failure = self._starter.recover(step, error, lost)
        except JobError as end:
            try:
                self._save_last()
            finally:
                back_to, source = self._starter.active.resume_point()
                self._record.failed(asdict(Failure.ending(step, end, back_to, source, lost(back_to))))
            raise
        except (KeyboardInterrupt, SystemExit):
            if self._starter.awaits_room:
                self._save_last()
            raise
        self._record.failed(asdict(failure))
        self._times.go_back(failure.back_to)
        self.next_step = failure.back_to
        self.saver.again(self.next_step)
        self._ahead = None

    @property
    def _survived(self) -> Failure:
        """The latest failure that the run has survived."""
        return self._starter.failures.survived[-1]

    def _save_last(self) -> None:
        self.saver.save_last(partial(self._starter.save_snapshots, self.next_step))

    def _patience(self, ahead: StepsAhead) -> AbstractContextManager[CtrlC]:
        """Return a context in which a Ctrl-C waits for steps; a SIGTERM does, too, if they do not take too long."""

        def is_too_long() -> bool:
            return self._starter.saves_at_once() and self._stops.is_too_long(ahead.pending, ahead.since)

        return patience("the steps they have", is_too_long)

    @contextmanager
    def _rewinding(self) -> Iterator[None]:
        """Go back to a checkpoint after a step that is not finite, if the run says so."""
        try:
            yield
        except NonFiniteError as error:
            if self.loaded.run.nonfinite != "rewind":
                raise
            with self._guarded():
                self.saver.settle()
                self.next_step = self._starter.go_on_after(rewound(self.loaded, error, self.next_step))
            self._ahead = None

    @contextmanager
    def _completing(self) -> Iterator[None]:
        """Let the actors complete the steps that they have at the end, also if the caller stops early."""
        try:
            yield
        finally:
            if self._num_ahead and self._lifetime.failure is None:  # of a failure, the next call takes the steps again
                with self._guarded():
                    while self._ahead is not None and len(self._ahead):
                        self._commit(*self._ahead.collect())
            self._ahead = None

    def _after_this_step(self, call: Callable[[], T]) -> T:
        """Call the actors in the state after this step; after a failure, lost steps are taken again first."""
        step = self.next_step
        while True:
            with self._guarded():
                return call()
            while self.next_step < step:
                again = self._handing(0)
                with self._guarded():
                    again.hand_over(self.next_step, step)
                    self._commit(*again.collect())

    # --- other calls ---

    def read(self, call: Callable[[], list[Any]]) -> list[Any]:
        """Call the actors, to read of the state after this step, or of a step by hand; survive a failure.

        Raises:
            StepLostError: The step by hand is lost.
            MovedError: The run goes on in another layout.
            CallError: The call failed on actors that live. The job goes on.
            JobError: The job is over; or another thread takes steps, and goes on after a failure.
        """
        if self._hand.midway is not None:
            return self._by_hand(call)
        alone = partial(self._alone, call, self.loaded, averaged=self.is_averaged)
        if not self.loaded.run.max_failures:
            with self._lifetime.guarded():
                return alone()
        if not self._training.acquire(blocking=False):
            self._lifetime.demand_open()
            return call()
        try:
            return self._after_this_step(alone)
        finally:
            self._training.release()

    def _alone(self, call: Callable[[], T], loaded: LoadedRun | None = None, *, averaged: bool) -> T:
        """Make a call that changes no weight, and keep the job if it fails on actors that live.

        Raises:
            CallError: It has failed so. With weights that are ``averaged`` the job is over instead, as elsewhere.
            MovedError: The run has gone on in another layout than the one that is ``loaded``.
        """
        if loaded is not None and loaded is not self.loaded:
            raise MovedError(f"the run goes on with dp={self.loaded.run.mesh.dp} since then: ask again")
        try:
            return call()
        except JobError as error:
            if averaged or self._num_ahead or not self._training.acquire(blocking=False):
                raise
            try:
                self.saver.settle()
                self._starter.rebuild(self.next_step, error)
                self._ahead = None
            finally:
                self._training.release()
            raise CallError(*error.args) from None

    def _by_hand(self, call: Callable[[], T]) -> T:
        """Call the actors in a step by hand. Raises StepLostError after a failure that the run has survived."""
        with self._guarded():
            return call()
        raise self._hand.lose(self._survived, self.next_step)

    def _demand_alive(self, what: str) -> None:
        """Raise JobError if the job is over, or in the middle of a step; replace an actor that has died since."""
        self.demand_ready()
        if self.loaded.run.max_failures:
            self._after_this_step(lambda: self.loaded.calls.all("progress", what=what))
