"""The training loop: hand steps to the actors, commit their reports, save checkpoints when they are due."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from raypar.actors.errors import CheckpointError, NonFiniteError
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind, format_watched
from raypar.checkpoint.background_save import Saver
from raypar.cluster.interrupts import patience
from raypar.errors import CallError, JobError, MovedError
from raypar.job.recover.planned_moves import rearranged
from raypar.job.recover.restarts import Restarts
from raypar.job.recover.rewind import rewound
from raypar.job.recover.stops import Stops
from raypar.job.start.lifetime import Lifetime
from raypar.job.start.loaded_run import LoadedRun
from raypar.job.steps.averages import evaluation_step, with_averages
from raypar.job.steps.displayed import Callback, displayed
from raypar.job.steps.evaluation import Evaluations
from raypar.job.steps.steps_ahead import StepsAhead, steps_to_take
from raypar.job.steps.steps_by_hand import StepsByHand
from raypar.paths import absolute, checkpoints_in, step_folder_name
from raypar.recovery.failures import Failure
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.record import Record
from raypar.reporting.report import Report, reports_of
from raypar.reporting.step_times import StepTimes
from raypar.reporting.stragglers import Stragglers
from raypar.stepping.stepper import Stepper

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
        next_step: Number of the next step, counted from 0: the number of steps taken.
        last: Report of the latest step; None before the first.
        generating: Held while text is generated.
        is_averaged: Whether that is done with the averages of the weights.
    """

    def __init__(
        self,
        lifetime: Lifetime,
        device: DeviceKind,
        loaded: LoadedRun,
        record: Record,
        starter: Restarts,
    ) -> None:
        self._lifetime, self._starter, self._hand = lifetime, starter, StepsByHand(device)
        self._training, self.generating = threading.RLock(), threading.Lock()  # the first: while a thread takes steps
        self._ahead: StepsAhead | None = None
        self.last: Report | None = None
        self.is_averaged = False
        self.exchange(loaded, record)

    def exchange(self, loaded: LoadedRun, record: Record) -> None:
        """Replace the run by another one, from its first step. The present one must be closed already."""
        self._hand.forget()
        self.loaded, self.next_step, self.last = loaded, 0, None
        self._record, self._saver = record, Saver(loaded.run, loaded.calls, loaded.world)
        self._stragglers, self._times = Stragglers(loaded.world), StepTimes()
        self._stops = Stops(loaded)
        self._evaluations, self._is_finished = Evaluations(loaded.run), False

    def move(self, loaded: LoadedRun, run: Run | None = None) -> None:
        """Go on in another layout, between two steps; with another run, whose layout it is, if it was asked for it."""
        self.loaded, self._evaluations.run = loaded, loaded.run
        self._saver.move(loaded.calls, loaded.world, run)
        self._record.move(loaded.run, loaded.schedule, self.next_step, loaded.skeleton, is_other=run is not None)
        self._stragglers, self._stops = Stragglers(loaded.world), Stops(loaded)

    def leave(self, folder: str | None) -> None:
        """Finish the run if its folder is this one, in which another run is to go on: it has one writer at a time."""
        if folder is not None and folder == self.loaded.run.folder:
            self.finish()

    def unlocked(self) -> AbstractContextManager[None]:
        """Complete the save under way, and return a context in which another run may take the run's folder."""
        self._saver.settle()
        return self._record.unlocked()

    def finish(self) -> None:
        """Keep the latest step's times, then end the saving and the record of the run. A second call does nothing."""
        if not self._is_finished:
            self._is_finished = True
            self.keep_times()
            self.close()

    def begin(self, step: int, name: str) -> None:
        """Start the run's record, once the actors have built the run.

        Args:
            step: Number of the first step to take.
            name: The job's name.
        """
        self.next_step, loaded = step, self.loaded
        self._record.begin(loaded.run, loaded.schedule, step, name, loaded.skeleton)
        if self.loaded.run.early_stop:
            self._evaluations.begin(self._record.validation_losses(self.loaded.run, step))

    def step(self) -> Report:
        """Take one compiled training step, as ``Job.step`` does."""
        with closing(self._train(1, 0)) as outcomes:
            report = next(outcomes)
            self._lifetime.guard(self._save_due)
            assert isinstance(report, Report)
            return report

    def train(self, steps: int | None, on: Callback | Sequence[Callback] | None, ahead: int | None) -> list[Report]:
        """Take training steps with a progress display, as ``Job.train`` does, and return their reports."""
        most = int(on is None) if ahead is None else ahead
        run = self.loaded.run
        count = steps_to_take(run, self.next_step, steps)
        try:
            with closing(self._train(count, most)) as outcomes:
                return displayed(run, self.next_step + count, outcomes, on)
        except (KeyboardInterrupt, SystemExit, CallError) as error:  # Ctrl-C, SIGTERM, an evaluation that failed
            self.keep(error)
            raise

    def evaluate(self, steps: int | None = None, *, ema: bool = False) -> Evaluation:
        """Compute the loss on validation data, as ``Job.evaluate`` does. That of averaged weights is not recorded."""
        self.demand_ready()

        def take(number: int) -> list[Any]:
            call = partial(self._alone, lambda: evaluation_step(self.loaded, number, ema=ema), averaged=ema)
            return self._after_this_step(call)

        evaluation = self._evaluations.take(self.next_step, steps, take, ema=ema)
        if not ema:
            self._record.write(evaluation)
        return evaluation

    def save(self, folder: Path, keep_last: int | None) -> Path:
        """Save a checkpoint now and return its path, as ``Job.save`` does. Raises CheckpointError."""
        self._demand_alive("saving a checkpoint")
        return self._lifetime.guard(partial(self._saver.save, folder, self.next_step, keep_last))

    def keep(self, error: BaseException) -> None:
        """Save a checkpoint of a run that is stopped, if it has a folder and its actors can still be called.

        Args:
            error: What stops it. It gets a note that says how the run goes on.
        """
        run, step = self.loaded.run, self.next_step
        if run.folder is None or not step or self._lifetime.failure is not None:
            return
        folder = checkpoints_in(absolute(run.folder))
        if self.saved != folder / step_folder_name(step):
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
        save = partial(self._saver.copy_weights, folder, self.next_step)
        return self._lifetime.guard(partial(with_averages, self.loaded.calls, save) if ema else save)

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
        if not self._training.acquire(blocking=False):
            raise JobError(f"another thread is taking steps of this job: ask for {what} when it has taken them")
        try:
            self.keep_times()
            self._saver.settle()
            self._ahead = None
            return self._lifetime.guard(partial(self._surviving, call))
        finally:
            self._training.release()

    def demand_ready(self) -> None:
        """Raise JobError if the job is over, or in the middle of a step."""
        self._lifetime.demand_open()
        self._hand.demand_over()
        if self._ahead is not None and len(self._ahead):
            raise JobError("train has handed over steps ahead: do this when it has returned, or train with ahead=0")
        if self.is_averaged:
            raise JobError("the actors compute with averaged weights: do this when generate has returned")

    @property
    def saved(self) -> Path | None:
        """The newest checkpoint of the run that was saved; None before the first."""
        return self._saver.newest

    @property
    def lost(self) -> BaseException | None:
        """Why the checkpoint at the end of the run was not saved; None if it was, or if it is not due yet."""
        return self._saver.lost

    def keep_times(self) -> None:
        """Write the latest step's times to the run's folder in the background, if the actors can still be called."""
        if (step := self._record.unmeasured()) is not None:
            with suppress(JobError):
                self.demand_ready()
                keep = partial(self._record.measured, step, self.loaded.schedule, self.loaded.world)
                self._saver.ask(("events", "ledger"), keep)

    def close(self, hurried: bool = False) -> None:
        """End the saving and the record of the run. ``hurried`` gives up a slow save, after a failure."""
        try:
            self._saver.close(hurried=hurried)
        finally:
            self._record.close()

    def _train(self, count: int, most: int) -> Generator[Report | Evaluation]:
        if not self._training.acquire(blocking=False):
            raise JobError("another thread is taking steps of this job: take them all in one")
        try:
            yield from self._steps(count, most)
        finally:
            self._training.release()

    def _steps(self, count: int, most: int) -> Generator[Report | Evaluation]:
        self.demand_ready()
        last = self.next_step + count
        ahead = self._ahead = self._handing(most)
        try:
            while self.next_step < last:
                self._lifetime.demand_open()
                if self._ahead is None:  # who was told of the last step has changed the layout
                    ahead = self._ahead = self._handing(most)
                is_due = self._starter.is_due()
                if is_due and not len(ahead):
                    self._lifetime.guard(partial(self._surviving, self._rearrange))
                    ahead = self._ahead = self._handing(most)
                if (lacks_copies := self._starter.lacks_copies(self._stops)) and not len(ahead):
                    self._lifetime.guard(partial(self._surviving, self._keep_copies))
                every = self._evaluations.every
                stop = (self.next_step // every + 1) * every if every else last
                stop = min(last, stop, self._saver.next_due(self.next_step, last))
                if (is_due or lacks_copies) and len(ahead):
                    stop = self.next_step + len(ahead)  # the actors complete what they have
                with patience("the steps they have", partial(self._is_too_long, ahead)) as ctrl_c:
                    try:
                        reports = self._lifetime.guard(partial(self._surviving, partial(self._next, ahead, stop)))
                    except NonFiniteError as error:
                        if self.loaded.run.nonfinite != "rewind":
                            raise
                        self._lifetime.guard(partial(self._surviving, partial(self._rewind, error)))
                        reports = None
                if not isinstance(reports, list):
                    ctrl_c.heed()
                    ahead = self._ahead = self._handing(most)
                    continue
                try:
                    yield from reports
                finally:
                    ctrl_c.heed()
                self._lifetime.guard(self._save_due)
                if every and self.next_step % every == 0 and self.next_step < self.loaded.run.steps:
                    yield (evaluation := self.evaluate())
                    if told := self._evaluations.keep(evaluation):
                        log.warning("%s", told)
                        if not self._saver.due(self.next_step):
                            self._lifetime.guard(partial(self._saver.after, self.next_step, is_last=True))
                        break
        finally:  # the caller may have stopped early, but the actors still complete the steps they have
            if len(ahead) and self._lifetime.failure is None:  # of a failure, the next call takes the steps again
                self._lifetime.guard(partial(self._surviving, partial(self._settle, ahead)))

    def _handing(self, most: int) -> StepsAhead:
        return StepsAhead.of(self.loaded, most, self._lifetime.epoch, self._starter.copy_due)

    def _next(self, ahead: StepsAhead, stop: int) -> list[Report]:
        """Hand over steps before ``stop``, then wait for the oldest one, or those that overlap, and commit it."""
        ahead.hand_over(self.next_step, stop)
        return self._commit(*ahead.collect())

    def _surviving(self, call: Callable[[], T]) -> T | Failure:
        """Call the actors; after a failure bring the run back, and return it. Raises JobError if that is too late."""
        start = time.perf_counter()
        try:
            return call()
        except CallError:
            raise
        except (KeyboardInterrupt, SystemExit):  # in the middle of a step
            self._saver.save_last(partial(self._starter.save_snapshots, self.next_step))
            raise
        except JobError as error:
            self._saver.settle(_SAVE_SECONDS)
            step, lost = self.next_step + 1, partial(self._times.lost, start)
            try:
                failure = self._starter.recover(step, error, lost)
            except JobError as end:
                self._record.failed(Failure.ending(step, end, lost(step - 1)).to_dict())
                self._saver.save_last(partial(self._starter.save_snapshots, self.next_step))
                raise
            except (KeyboardInterrupt, SystemExit):
                if self._starter.awaits_room:
                    self._saver.save_last(partial(self._starter.save_snapshots, self.next_step))
                raise
            self._record.failed(failure.to_dict())
            self._times.go_back(failure.back_to)
            self.next_step = failure.back_to
            self._saver.again(self.next_step)
            if self._ahead is not None:
                self._ahead.drop()
            return failure

    def _keep_copies(self) -> None:
        """Let the actors keep copies of their state, without which a run that is stopped in a step is not saved."""
        self._starter.keep_copies(self._stops, self.next_step)

    def _is_too_long(self, ahead: StepsAhead) -> bool:
        """Return whether a SIGTERM that comes now must not wait for the steps that the actors have."""
        return self._starter.saves_at_once() and self._stops.is_too_long(ahead.pending, ahead.since)

    def _rearrange(self) -> None:
        self._saver.settle()
        self.next_step = rearranged(self._starter, self._saver, self.loaded.run, self.next_step)

    def _after_this_step(self, call: Callable[[], T]) -> T:
        """Call the actors in the state after this step; after a failure, lost steps are taken again first."""
        step = self.next_step
        while isinstance(answer := self._lifetime.guard(partial(self._surviving, call)), Failure):
            while self.next_step < step:
                again = self._handing(0)
                self._lifetime.guard(partial(self._surviving, partial(self._next, again, step)))
        return answer

    def read(self, call: Callable[[], list[Any]]) -> list[Any]:
        """Call the actors, to read of the state after this step, or of a step by hand; survive a failure.

        Raises:
            StepLostError: The step by hand is lost.
            MovedError: The run goes on in another layout.
            CallError: The call failed on actors that live. The job goes on.
            JobError: The job is over; or another thread takes steps, and goes on after a failure.
        """
        if self._hand.is_midway:
            return self._by_hand(call)
        alone = partial(self._alone, call, self.loaded, averaged=self.is_averaged)
        if not self.loaded.run.max_failures:
            return self._lifetime.guard(alone)
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
            if averaged or len(self._ahead or ()) or not self._training.acquire(blocking=False):
                raise
            try:
                self._saver.settle()
                self._starter.rebuild(self.next_step, error)
                self._ahead = None
            finally:
                self._training.release()
            raise CallError(*error.args) from None

    def _by_hand(self, call: Callable[[], T]) -> T:
        """Call the actors in a step by hand. Raises StepLostError after a failure that the run has survived."""
        answer = self._lifetime.guard(partial(self._surviving, call))
        if not isinstance(answer, Failure):
            return answer
        raise self._hand.lose(answer, self.next_step)

    def _demand_alive(self, what: str) -> None:
        """Raise JobError if the job is over, or in the middle of a step; replace an actor that has died since."""
        self.demand_ready()
        if self.loaded.run.max_failures:
            self._after_this_step(lambda: self.loaded.calls.all("progress", what=what))

    def _rewind(self, error: NonFiniteError) -> None:
        self._saver.settle()
        self.next_step = self._starter.go_on_after(rewound(self.loaded, error, self.next_step))

    def _settle(self, ahead: StepsAhead) -> None:
        while len(ahead):
            self._commit(*ahead.collect())

    def _save_due(self) -> None:
        if self._saver.due(self.next_step):
            self.keep_times()
        self._saver.after(self.next_step)

    def _commit(self, results: list[Any], seconds: float, *, by_hand: bool = False) -> list[Report]:
        """Count the steps that every actor has reported now: one, or those that overlap. Record their reports."""
        watched = format_watched(self.loaded.run.overflow_format, self.loaded.run.precision.compute)
        reports = reports_of(self.next_step, seconds, results, self.loaded.world, by_hand=by_hand, watched=watched)
        if not by_hand:
            self._stragglers.warn(reports[-1].steps_taken, [result.busy for result in results])
        self._starter.learn(results, seconds)
        for report in reports:
            self._times.keep(self.next_step, report.step_ms / 1e3)
            self._stops.learn(report.step_ms / 1e3)
            self.next_step += 1
            self.last = report
            self._record.write(report)
        return reports
