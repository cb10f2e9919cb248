"""The training loop: steps are handed to the actors, their reports are committed, checkpoints saved when due."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from raypar.actors.errors import NonFiniteError
from raypar.actors.specs.data import Batches
from raypar.actors.specs.types import DeviceKind
from raypar.checkpoint.background_save import Saver
from raypar.cluster.calls import Calls
from raypar.cluster.interrupts import patience
from raypar.config.schedule import programs_of
from raypar.errors import ConfigError, JobError
from raypar.job.lifetime import Lifetime
from raypar.job.loaded_run import LoadedRun
from raypar.reporting.progress import display
from raypar.reporting.record import Record
from raypar.reporting.report import Evaluation, Report, losses_of, mean_loss, report_of
from raypar.schedules.schedule import Schedule
from raypar.stepping.recording import Recorder
from raypar.stepping.stepper import Stepper


class Ahead:
    """Hands steps to the actors before the one they work on has been reported, so that they never wait for the driver.

    most   steps that may be handed over beyond the one that is waited for
    epoch  how many steps could not be made by now: actors refuse a call of an earlier one
    """

    def __init__(self, calls: Calls, most: int, epoch: int) -> None:
        self._calls, self._most, self._epoch = calls, most, epoch
        self._handed: deque[tuple[int, list[Any]]] = deque()
        self._since = time.perf_counter()

    def hand_over(self, first: int, stop: int) -> None:
        """Hand over the steps from ``first`` (the one to be reported next) on, but not step ``stop``."""
        if not self._handed:
            self._since = time.perf_counter()
        for number in range(first + len(self._handed), min(stop, first + self._most + 1)):
            self._handed.append((number, self._calls.submit("run", "train", number, self._epoch)))

    def collect(self) -> tuple[list[Any], float]:
        """The results of the oldest step, and the seconds since the one before it (or since it was handed over).

        They are no less than an actor took: the driver may have come late to the one before.

        Raises what Calls.gather raises. After a NonFiniteError nothing is left: the actors refuse what came behind.
        """
        number, refs = self._handed.popleft()
        try:
            results = self._calls.gather(refs, f"step {number}")
        except NonFiniteError:
            while self._handed:
                self._calls.drop(self._handed.popleft()[1])
            raise
        before, self._since = self._since, time.perf_counter()
        return results, max([self._since - before, *[result.span for result in results]])

    def __len__(self) -> int:
        return len(self._handed)


class TrainingLoop:
    """Takes the training steps of a job's run: hands them to the actors, commits their reports, saves when a checkpoint
    is due, and evaluates in between.

    loaded     the run that it trains
    next_step  number of the step that comes next
    last       the report of the latest step; None before the first
    """

    def __init__(self, lifetime: Lifetime, device: DeviceKind, loaded: LoadedRun, record: Record) -> None:
        self._lifetime, self._device = lifetime, device
        self._training = threading.RLock()  # held by the thread that takes steps
        self._ahead: Ahead | None = None
        self._stepper: Stepper | None = None
        self.last: Report | None = None
        self.loaded, self.next_step = loaded, 0
        self._record, self._saver = record, Saver(loaded.run, loaded.calls, loaded.world)

    def exchange(self, loaded: LoadedRun, record: Record) -> None:
        """Train another run from its first step on; the one before it was closed."""
        self._stepper, self.last = None, None
        self.loaded, self.next_step = loaded, 0
        self._record, self._saver = record, Saver(loaded.run, loaded.calls, loaded.world)

    def begin(self, step: int, name: str) -> None:
        """The actors have the run: tell its record that it begins with ``step``; ``name`` is the job's."""
        self.next_step = step
        self._record.begin(self.loaded.run, self.loaded.schedule, step, name)

    def step(self) -> Report:
        """Take one compiled training step."""
        with closing(self._train(1, 0)) as outcomes:
            report = next(outcomes)
            assert isinstance(report, Report)
            return report

    def train(
        self, steps: int | None, on: Callable[[Report | Evaluation], None] | None, ahead: int | None
    ) -> list[Report]:
        """Take training steps with progress, as ``Job.train`` does; returns their reports."""
        most = int(on is None) if ahead is None else ahead
        if not isinstance(most, int) or most < 0:
            raise ValueError(f"ahead is {ahead!r}: give a number of steps, 0 or more")
        run = self.loaded.run
        count = max(0, run.steps - self.next_step) if steps is None else steps
        reports: list[Report] = []
        with display(run, self.next_step + count) as shown, closing(self._train(count, most)) as outcomes:
            for outcome in outcomes:
                shown.show(outcome)
                if on is not None:
                    on(outcome)
                if isinstance(outcome, Report):
                    reports.append(outcome)
        return reports

    def evaluate(self, steps: int | None = None) -> Evaluation:
        """Take the loss on validation data, over ``steps`` (None: ``run.eval_steps``) evaluations.

        Raises ConfigError if the data has none, ValueError if ``steps`` is less than 1.
        """
        self.demand_ready()
        run, calls = self.loaded.run, self.loaded.calls
        if isinstance(run.data, Batches) and run.data.validate is None:
            raise ConfigError(["data has no validation batches: give Batches a validate function"])
        count = run.eval_steps if steps is None else steps
        if count < 1:
            raise ValueError(f"an evaluation of {count} steps has no loss: ask for at least 1")
        start, losses, counts = time.perf_counter(), list[float](), list[int]()
        for number in range(count):
            call = partial(calls.all, "run", "evaluate", number, what=f"evaluation {number}")
            found = losses_of(self._lifetime.guard(call))
            losses += found[0]
            counts += found[1]
        evaluation = Evaluation(self.next_step, mean_loss(losses, counts), sum(counts), time.perf_counter() - start)
        self._record.write(evaluation)
        return evaluation

    def save(self, folder: Path, keep_last: int | None) -> Path:
        """Save a checkpoint now; returns its path. Raises CheckpointError if the folder can't be written."""
        self.demand_ready()
        return self._lifetime.guard(partial(self._saver.save, folder, self.next_step, keep_last))

    def stepper(self) -> Stepper:
        """The next training step, action by action; the stepper of it that is under way, if there is one."""
        self._lifetime.demand_open()
        if self._stepper is not None and self._stepper.midway and self._stepper.done:
            return self._stepper
        self.demand_ready()
        loaded = self.loaded
        self._stepper = Stepper(
            loaded.schedule,
            self.next_step,
            loaded.world,
            loaded.handles,
            loaded.calls,
            guard=self._lifetime.guard,
            commit=self._commit,
            lowered=self._lowered,
            recorder=Recorder(loaded.run, self._device, loaded.world, loaded.calls),
        )
        return self._stepper

    def demand_ready(self) -> None:
        """Raise JobError if the job is over, or in the middle of a step."""
        self._lifetime.demand_open()
        if self._stepper is not None and self._stepper.midway and not self._stepper.done:
            self._stepper.abort()  # it has not done anything that somebody may want to go on with
        if self._stepper is not None and self._stepper.midway:
            raise JobError("job.stepper() is in the middle of this step: call its finish() or abort() first")
        if self._ahead is not None and len(self._ahead):
            raise JobError("train has handed over steps ahead: do this when it has returned, or train with ahead=0")

    def keep_times(self) -> None:
        """Leave the latest step's times in the run's folder, beside the next ones, if the actors can still be asked."""
        step = self._record.unmeasured()
        if step is not None:
            with suppress(JobError):
                self.demand_ready()
                keep = partial(self._record.measured, step, self.loaded.schedule, self.loaded.world)
                self._saver.ask(("events", "ledger"), keep)

    def close(self, hurried: bool = False) -> None:
        """End what the run has begun beside its actors; a run that has failed is ``hurried``."""
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
        # a step that could not be made is not told to replicas that servers keep in step: they would take the next one
        most = 0 if self.loaded.world.servers else most
        ahead = self._ahead = Ahead(self.loaded.calls, most, self._lifetime.epoch)
        try:
            while self.next_step < last:
                self._lifetime.demand_open()
                every = self.loaded.run.eval_every
                stop = (self.next_step // every + 1) * every if every else last
                stop = min(last, stop, self._saver.next_due(self.next_step, last))
                with patience("the steps they have") as ctrl_c:
                    report = self._lifetime.guard(partial(self._next, ahead, stop))
                try:
                    yield report
                finally:
                    ctrl_c.heed()
                self._lifetime.guard(self._save_due)
                if every and self.next_step % every == 0 and self.next_step < self.loaded.run.steps:
                    yield self.evaluate()
        finally:  # nobody wants more reports: the actors go on all the same with what they have
            if len(ahead) and self._lifetime.failure is None:
                self._lifetime.guard(partial(self._settle, ahead))

    def _next(self, ahead: Ahead, stop: int) -> Report:
        """Hand over the steps before ``stop``, and wait for the oldest."""
        ahead.hand_over(self.next_step, stop)
        return self._commit(*ahead.collect())

    def _settle(self, ahead: Ahead) -> None:
        while len(ahead):
            self._commit(*ahead.collect())

    def _save_due(self) -> None:
        if self._saver.due(self.next_step):
            self.keep_times()
        self._saver.after(self.next_step)

    def _commit(self, results: list[Any], seconds: float) -> Report:
        """The step counts once every actor has reported it."""
        report = report_of(self.next_step, seconds, results, self.loaded.world)
        self.next_step += 1
        self.last = report
        self._record.write(report)
        return report

    def _lowered(self, schedule: str | Schedule) -> Schedule:
        """A schedule for a training step of this run, its backwards as they are written. Raises ScheduleError."""
        run, reduces = self.loaded.run, self.loaded.world.reduces
        return programs_of(schedule, run.mesh.pp, run.microbatches, run.chunks, reduce_grad=reduces)["train"]
