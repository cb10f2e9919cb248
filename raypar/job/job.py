"""The job: a run on its actors, trained, inspected, exchanged for another one, and ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from raypar.actors.collective.ledger import Entry
from raypar.actors.sharding import Shard
from raypar.actors.specs.run import Run
from raypar.checkpoint.find import Found
from raypar.checkpoint.resume import prepared
from raypar.cluster.calls import Calls
from raypar.cluster.ray_cluster import Actors, demand_shippable
from raypar.config.run import reset_faults, world_of
from raypar.config.schedule import Programs
from raypar.config.skeleton import Skeleton
from raypar.errors import ConfigError
from raypar.job.inspection import Inspection
from raypar.job.lifetime import Lifetime
from raypar.job.loaded_run import LoadedRun
from raypar.job.plans import plans_of
from raypar.job.training_loop import TrainingLoop
from raypar.reporting.record import Record
from raypar.reporting.report import Evaluation, Report
from raypar.schedules.drawing.overlay import Overlay
from raypar.schedules.schedule import Schedule
from raypar.schedules.timeline import Timeline
from raypar.stepping.stepper import Stepper

if TYPE_CHECKING:
    from torch import Tensor

    from raypar.actors.inspect.activations import Sight, Spot

_LAUNCH_SECONDS = 60.0  # for actors to start, build and meet, however short a run's own timeout is
_MOST_SHOWN = 200  # actions of a schedule that a job shows in a REPL


class Job:
    """A run on its actors. ``launch`` makes one.

    run         what it was launched with, or reset to
    device      what its actors compute on: cpu or cuda
    num_actors  how many were launched; a run that it was reset to may need fewer
    schedule    of a training step, as it is drawn, checked, simulated, stepped and run
    next_step   number of the step that comes next
    """

    def __init__(
        self,
        run: Run,
        programs: Programs,
        skeleton: Skeleton,
        actors: Actors,
        name: str,
        record: Record,
        found: Found | None = None,
    ) -> None:
        self.device, self.num_actors = actors.device, len(actors.handles)
        self._name, self._generation = name, 1
        self._lifetime = Lifetime(actors, self.close)
        loaded = self._loaded(run, programs, skeleton)
        self._loop = TrainingLoop(self._lifetime, self.device, loaded, record)
        self._inspection = Inspection(self._lifetime, loaded, self._start(loaded, programs, found))

    @property
    def run(self) -> Run:
        return self._loop.loaded.run

    @property
    def schedule(self) -> Schedule:
        return self._loop.loaded.schedule

    @property
    def next_step(self) -> int:
        return self._loop.next_step

    @next_step.setter
    def next_step(self, step: int) -> None:
        self._loop.next_step = step

    def __repr__(self) -> str:
        grid = repr(self.schedule) if self.schedule.num_actions <= _MOST_SHOWN else self.schedule.title
        return f"{self._told()}\n{grid}"

    def _repr_html_(self) -> str:
        """What a notebook shows: the same, with a picture."""
        return f"<pre>{escape(self._told())}</pre>{self.schedule._repr_svg_() or ''}"

    # --- training ---

    def step(self) -> Report:
        """One compiled training step: every actor performs its row; one call an actor."""
        return self._loop.step()

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
        return self._loop.train(steps, on, ahead)

    def evaluate(self, steps: int | None = None) -> Evaluation:
        """The loss on validation data: ``steps`` (None: ``run.eval_steps``) times ``run.microbatches`` microbatches, on
        each replica others."""
        return self._loop.evaluate(steps)

    def save(self, folder: str | Path, keep_last: int | None = None) -> Path:
        """Save a checkpoint into a folder; returns its path when it is whole and on disk.

        Of those of earlier steps, only the ``keep_last - 1`` newest stay; None keeps all. In ``run.folder`` are those
        that are saved beside the training. Raises CheckpointError if the folder can't be written; the job can go on.
        """
        return self._loop.save(Path(folder), keep_last)

    def stepper(self) -> Stepper:
        """The next training step, action by action; the stepper of it that is under way, if there is one."""
        return self._loop.stepper()

    # --- looking inside ---

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shape of every logical parameter."""
        return self._inspection.parameters

    def param(self, name: str) -> Tensor:
        """A weight by its logical name, whole, fetched from the actors that hold it, on the CPU."""
        return self._inspection.param(name)

    def weights(self, dp: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Every weight of a replica with its logical name, one actor's after the other; both ends of a tie, if they are
        apart.

        A copy goes by the name of its home.
        """
        return self._inspection.weights(dp)

    def grad(self, name: str) -> Tensor | None:
        """A gradient of the latest step as the optimizer saw it (summed, clipped); None before the first step.

        It comes from the actor that updates the weight: a worker, or a parameter server.
        """
        return self._inspection.grad(name)

    def gradients(self) -> dict[str, Tensor | None]:
        """What ``grad`` gives of every parameter, by logical name; every actor is asked once."""
        return self._inspection.gradients()

    def watch(self) -> tuple[str, ...]:
        """Have the actors keep what their layers make in the step that a stepper has just opened, and the gradients
        there, for ``sights``; the logical names of those layers, and of modules in them. Instead of a recording."""
        return self._inspection.watch()

    def sights(self, spots: Sequence[Spot]) -> list[dict[int, Sight]]:
        """What the actors have of each of these tensors, which were watched, by rank."""
        return self._inspection.sights(spots)

    def grads(self, name: str) -> dict[int, tuple[Shard, Tensor]]:
        """What every actor has of a gradient of the latest step, by rank; those that have none are left out."""
        return self._inspection.grads(name)

    def ledger(self) -> dict[str, dict[tuple[str, str], Entry]]:
        """What every actor's groups moved since the launch: calls, bytes and seconds by (axis, op)."""
        return self._inspection.ledger()

    def timeline(self, dp: int = 0) -> Timeline:
        """The latest compiled training step of one replica as measured, in seconds from the first action of any.

        Before there is one, ValueError: a step by hand is not measured.
        """
        return self._inspection.timeline(dp)

    def timelines(self, ago: int = 0) -> list[Timeline]:
        """The latest compiled training step on one clock: a timeline for each replica, then one for the servers 0, the
        servers 1, ... of the pipeline ranks.

        ``ago`` asks for a step so many before the latest: actors remember a few. Of others nothing is measured.
        """
        return self._inspection.timelines(ago)

    def overlay(self, dp: int = 0) -> Overlay:
        """The latest compiled training step of one replica over what those before it predict: simulated with their
        costs.

        After the first step there are none, and it is its own prediction. Before it, ValueError.
        """
        return self._inspection.overlay(dp)

    # --- its life ---

    def reset(self, run: Run, *, resume: str | Path | Found | None = None) -> None:
        """Begin another run, from ``resume`` as in ``launch``, on the same actors; those not needed are idle.

        Their nodes, shares of GPUs and names in Ray's dashboard stay. Raises ConfigError, before anything is changed.
        """
        self._loop.demand_ready()
        programs, skeleton, found = prepared(run, resume)
        if faults := list(reset_faults(run, self.num_actors, self.device)):
            raise ConfigError(faults)
        demand_shippable(run.model, run.data)
        self._lifetime.guard(partial(self._exchange, run, programs, skeleton, found, Record(run)))

    def close(self) -> None:
        """Finish the save under way; end the actors, and Ray if the launch started it. More than once does no harm."""
        try:
            self._loop.keep_times()
        finally:
            self._lifetime.end(self._loop.close)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- loading a run ---

    def _exchange(self, run: Run, programs: Programs, skeleton: Skeleton, found: Found | None, record: Record) -> None:
        """Load another run on the actors in the place of the one that they have."""
        self._loop.keep_times()
        self._loop.close()
        try:
            self._loop.loaded.calls.all("leave", what="the end of the run before")
            self._generation += 1
            loaded = self._loaded(run, programs, skeleton)
            self._loop.exchange(loaded, record)
        except BaseException:
            record.close()
            raise
        self._inspection = Inspection(self._lifetime, loaded, self._start(loaded, programs, found))

    def _loaded(self, run: Run, programs: Programs, skeleton: Skeleton) -> LoadedRun:
        """A run and the actors that it needs; nothing is told to them yet."""
        world, schedule = world_of(run), programs["train"]
        calls = self._lifetime.calls_on(world, run.timeout)
        handles = self._lifetime.handles(world.size)
        return LoadedRun(run, schedule, world, handles, calls, skeleton)

    def _start(self, loaded: LoadedRun, programs: Programs, found: Found | None) -> Sequence[Mapping[str, Shard]]:
        """Have the actors build their parts of a run, and load a checkpoint; what each rank then has of which logical
        parameters."""
        run, guard = loaded.run, self._lifetime.guard
        name = f"{self._name}@{self._generation}"
        plans = plans_of(run, programs, name, self.device)
        refs = [handle.start.remote(plan) for handle, plan in zip(loaded.handles, plans, strict=True)]
        launch = Calls(loaded.handles, loaded.world, max(run.timeout, _LAUNCH_SECONDS))
        holds: list[dict[str, Shard]] = guard(lambda: launch.gather(refs, "the launch"), patient=False)
        if found is not None:
            state = str(found.path), found.manifest.tensors
            guard(lambda: launch.all("load", *state, what=f"loading {found.path.name}"), patient=False)
        self._loop.begin(0 if found is None else found.manifest.step, self._name)
        return holds

    def _told(self) -> str:
        """The job in three lines."""
        failure, last, world = self._lifetime.failure, self._loop.last, self._loop.loaded.world
        over = f", over: {failure}" if failure is not None else ""
        loss = f", loss {last.loss:.4f} in step {last.step}" if last is not None else ""
        return (
            f"<Job on {world.size} actors, {self.device}{over}>\n{self.run.model} on {self.run.mesh}\n"
            f"next step {self.next_step} of {self.run.steps}{loss}"
        )
