"""The driver: loads a run on its actors, steps them, asks them, ends them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from raypar.actors.optim.lr import lr_at
from raypar.actors.sharding import Cut
from raypar.actors.specs.data import Batches
from raypar.actors.specs.run import Run
from raypar.checkpoint.background_save import Saver
from raypar.checkpoint.find import Found
from raypar.checkpoint.resume import prepared
from raypar.cluster.calls import Calls
from raypar.cluster.interrupts import patience
from raypar.cluster.ray_cluster import Actors, demand_shippable
from raypar.config.run import reset_faults, world_of
from raypar.config.schedule import Programs, programs_of
from raypar.errors import ConfigError, JobError
from raypar.job.inspection import Inside
from raypar.job.plans import plans_of
from raypar.job.training_loop import Ahead
from raypar.planner.cost_model import performed
from raypar.reporting.progress import display
from raypar.reporting.record import Record
from raypar.reporting.report import Evaluation, Report, losses_of, mean_loss, report_of
from raypar.schedules.schedule import Schedule
from raypar.stepping.recording import Recorder
from raypar.stepping.stepper import Stepper

_LAUNCH_SECONDS = 60.0  # for actors to start, build and meet, however short a run's own timeout is


class Job(Inside):
    """A run on its actors. ``launch`` makes one.

    run         what it was launched with, or reset to
    device      what its actors compute on: cpu or cuda
    num_actors  how many were launched; a run that it was reset to may need fewer
    schedule    the lowered schedule of a training step; actors perform some of its backwards in halves
    next_step   number of the step that comes next
    """

    def __init__(
        self, run: Run, programs: Programs, actors: Actors, name: str, record: Record, found: Found | None = None
    ) -> None:
        self._actors: Actors | None = actors
        self._record = record
        self.device, self.num_actors = actors.device, len(actors.handles)
        self._name, self._generation, self._epoch = name, 0, 0
        self._failure: str | None = None
        self._stepper: Stepper | None = None
        self._ahead: Ahead | None = None
        self._training = threading.RLock()  # held by the thread that takes steps
        self._load(run, programs, found)

    # --- training ---

    def step(self) -> Report:
        """One compiled training step: every actor performs its row; one call an actor."""
        with closing(self._train(1, 0)) as outcomes:
            report = next(outcomes)
            assert isinstance(report, Report)
            return report

    def train(
        self,
        steps: int | None = None,
        *,
        on: Callable[[Report | Evaluation], None] | None = None,
        ahead: int | None = None,
    ) -> list[Report]:
        """Train ``steps`` steps (None: what is left of the run's) with progress; returns their reports.

        ``on`` is called with every report, and with every evaluation that ``run.eval_every`` asks for. ``ahead`` steps
        are handed to the actors before the report of the one they work on is in: then they never wait for the driver,
        but what ``on`` looks up in the job may be that many steps further. None is 0 with ``on`` and 1 without.
        """
        most = int(on is None) if ahead is None else ahead
        if not isinstance(most, int) or most < 0:
            raise ValueError(f"ahead is {ahead!r}: give a number of steps, 0 or more")
        count = max(0, self.run.steps - self.next_step) if steps is None else steps
        reports: list[Report] = []
        with display(self.run, self.next_step + count) as shown, closing(self._train(count, most)) as outcomes:
            for outcome in outcomes:
                shown.show(outcome)
                if on is not None:
                    on(outcome)
                if isinstance(outcome, Report):
                    reports.append(outcome)
        return reports

    def evaluate(self, steps: int | None = None) -> Evaluation:
        """The loss on validation data: ``steps`` (None: ``run.eval_steps``) times ``run.microbatches`` microbatches, on
        each replica others."""
        self._demand_ready()
        if isinstance(self.run.data, Batches) and self.run.data.validate is None:
            raise ConfigError(["data has no validation batches: give Batches a validate function"])
        count = self.run.eval_steps if steps is None else steps
        if count < 1:
            raise ValueError(f"an evaluation of {count} steps has no loss: ask for at least 1")
        start, losses, counts = time.perf_counter(), list[float](), list[int]()
        for number in range(count):
            call = partial(self._calls.all, "run", "evaluate", number, what=f"evaluation {number}")
            found = losses_of(self._guard(call))
            losses += found[0]
            counts += found[1]
        evaluation = Evaluation(self.next_step, mean_loss(losses, counts), sum(counts), time.perf_counter() - start)
        self._record.write(evaluation)
        return evaluation

    def save(self, folder: str | Path, keep_last: int | None = None) -> Path:
        """Save a checkpoint into a folder; returns its path when it is whole and on disk.

        Of those of earlier steps, only the ``keep_last - 1`` newest stay; None keeps all. In ``run.folder`` are those
        that are saved beside the training. Raises CheckpointError if the folder can't be written; the job can go on.
        """
        self._demand_ready()
        return self._guard(partial(self._saver.save, Path(folder), self.next_step, keep_last))

    def stepper(self) -> Stepper:
        """The next training step, action by action; the stepper of it that is under way, if there is one."""
        self._demand_open()
        if self._stepper is not None and self._stepper.midway and self._stepper.done:
            return self._stepper
        self._demand_ready()
        self._stepper = Stepper(
            self.schedule,
            self.next_step,
            self._world,
            self._handles,
            self._calls,
            guard=self._guard,
            commit=self._commit,
            lowered=self._lowered,
            recorder=Recorder(self.run, self.device, self._world, self._calls),
        )
        return self._stepper

    # --- its life ---

    def reset(self, run: Run, *, resume: str | Path | Found | None = None) -> None:
        """Begin another run, from ``resume`` as in ``launch``, on the same actors; those not needed are idle.

        Their nodes, shares of GPUs and names in Ray's dashboard stay. Raises ConfigError, before anything is changed.
        """
        self._demand_ready()
        programs, found = prepared(run, resume)
        if faults := list(reset_faults(run, self.num_actors, self.device)):
            raise ConfigError(faults)
        demand_shippable(run.model, run.data)
        self._guard(partial(self._exchange, run, programs, found, Record(run)))

    def close(self) -> None:
        """Finish the save under way; end the actors, and Ray if the launch started it. More than once does no harm."""
        try:
            self._keep_times()
        finally:
            if self._actors is not None:
                (actors, self._actors), failure = (self._actors, None), self._failure
                self._failure = failure or "the job was closed"
                try:
                    self._let_go(hurried=failure is not None)
                finally:
                    actors.end()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---

    def _exchange(self, run: Run, programs: Programs, found: Found | None, record: Record) -> None:
        self._keep_times()
        self._let_go()
        self._record = record
        self._calls.all("leave", what="the end of the run before")
        self._load(run, programs, found)

    def _load(self, run: Run, programs: Programs, found: Found | None = None) -> None:
        self._generation += 1
        self.run, self.schedule, self.next_step = run, programs["train"], 0
        self._world, self._stepper = world_of(run), None
        self._last: Report | None = None
        self._calls = Calls(self._handles, self._world, run.timeout)
        self._saver = Saver(run, self._calls, self._world)
        self._performed = performed(run, self.schedule)
        plans = plans_of(run, programs, self._performed, f"{self._name}@{self._generation}", self.device)
        refs = [handle.start.remote(plan) for handle, plan in zip(self._handles, plans, strict=True)]
        launch = Calls(self._handles, self._world, max(run.timeout, _LAUNCH_SECONDS))
        self._holds: list[dict[str, Cut]] = self._guard(lambda: launch.gather(refs, "the launch"), patient=False)
        if found is not None:
            state = str(found.path), found.manifest.tensors
            self._guard(lambda: launch.all("load", *state, what=f"loading {found.path.name}"), patient=False)
            self.next_step = found.manifest.step
        self._record.begin(run, self.schedule, self.next_step, self._name)

    def _train(self, count: int, most: int) -> Generator[Report | Evaluation]:
        if not self._training.acquire(blocking=False):
            raise JobError("another thread is taking steps of this job: take them all in one")
        try:
            yield from self._steps(count, most)
        finally:
            self._training.release()

    def _steps(self, count: int, most: int) -> Generator[Report | Evaluation]:
        self._demand_ready()
        last = self.next_step + count
        # replicas that servers keep in step do not hear of a step that could not be made, and would take the next one
        ahead = self._ahead = Ahead(self._calls, 0 if self._world.servers else most, self._epoch)
        try:
            while self.next_step < last:
                self._demand_open()
                every = self.run.eval_every
                stop = (self.next_step // every + 1) * every if every else last
                stop = min(last, stop, self._saver.next_due(self.next_step, last))
                with patience("the steps they have") as ctrl_c:
                    report = self._guard(partial(self._next, ahead, stop))
                try:
                    yield report
                finally:
                    ctrl_c.heed()
                self._guard(self._save_due)
                if every and self.next_step % every == 0 and self.next_step < self.run.steps:
                    yield self.evaluate()
        finally:  # nobody wants more reports: the actors go on all the same with what they have
            if len(ahead) and self._failure is None:
                self._guard(partial(self._settle, ahead))

    def _next(self, ahead: Ahead, stop: int) -> Report:
        """Hand over the steps before ``stop``, and wait for the oldest."""
        ahead.hand_over(self.next_step, stop)
        return self._commit(*ahead.collect())

    def _settle(self, ahead: Ahead) -> None:
        while len(ahead):
            self._commit(*ahead.collect())

    def _save_due(self) -> None:
        if self._saver.due(self.next_step):
            self._keep_times()
        self._saver.after(self.next_step)

    def _lowered(self, schedule: str | Schedule) -> Schedule:
        """A schedule for a training step of this run. Raises ScheduleError."""
        run, reduces = self.run, self._world.reduces
        return programs_of(schedule, run.mesh.pp, run.microbatches, run.chunks, reduce_grad=reduces)["train"]

    def _commit(self, results: list[Any], seconds: float) -> Report:
        """The step counts once every actor has reported it."""
        lr = lr_at(self.run.optim, self.next_step, self.run.steps)
        report = report_of(self.next_step, lr, seconds, results, self._world)
        self.next_step += 1
        self._last = report
        self._record.write(report)
        return report

    def _keep_times(self) -> None:
        """Leave the latest step's times in the run's folder, beside the next ones, if the actors can still be asked."""
        step = self._record.unmeasured()
        if step is not None:
            with suppress(JobError):
                self._demand_ready()
                keep = partial(self._record.measured, step, self._performed, self._world)
                self._saver.ask(("events", "ledger"), keep)

    def _let_go(self, *, hurried: bool = False) -> None:
        """End what a run has begun beside its actors."""
        try:
            self._saver.close(hurried=hurried)
        finally:
            self._record.close()

    @property
    def _handles(self) -> list[Any]:
        self._demand_open()
        assert self._actors is not None
        return self._actors.handles[: self._world.size]

    def _demand_ready(self) -> None:
        self._demand_open()
        if self._stepper is not None and self._stepper.midway and not self._stepper.done:
            self._stepper.abort()  # it has not done anything that somebody may want to go on with
        if self._stepper is not None and self._stepper.midway:
            raise JobError("job.stepper() is in the middle of this step: call its finish() or abort() first")
        if self._ahead is not None and len(self._ahead):
            raise JobError("train has handed over steps ahead: do this when it has returned, or train with ahead=0")
