"""The driver: starts a run's actors, steps them, asks them, ends them."""

from __future__ import annotations

import difflib
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from raypar.actors.ledger import Entry
from raypar.actors.lr import lr_at
from raypar.actors.plan import NonFiniteError, Plan
from raypar.actors.specs import Batches
from raypar.calls import Calls
from raypar.cluster import Actors, demand_shippable, start_actors
from raypar.config import ConfigError, Run, check_run, rooted
from raypar.errors import JobError
from raypar.program import Programs, only_row
from raypar.progress import display
from raypar.report import Evaluation, Report, report_of
from raypar.schedules.timeline import Event, Timeline
from raypar.stepper import Stepper

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
log = logging.getLogger(__name__)
_LAUNCH_SECONDS = 60.0  # for actors to start, build and meet, however short a run's own timeout is


def launch(run: Run, *, wait_for_nodes: float = 0.0) -> Job:
    """Start a run's actors and build its model on them; use the Job in a ``with``, or close it.

    A cluster that has too few CPUs is given ``wait_for_nodes`` seconds for its autoscaler to bring more.

    Raises ConfigError with everything that is wrong with the run, before any actor starts.
    """
    programs = check_run(run)
    from raypar.actors.host import HostedWorker

    demand_shippable(run.model, run.data)
    log.info("starting %d actors", run.mesh.size)
    name = f"raypar-{uuid.uuid4().hex[:8]}"
    actors = start_actors(HostedWorker, run.mesh, name, wait_for_nodes)
    try:
        return Job(run, programs, actors, name)
    except BaseException:
        actors.end()
        raise


class Job:
    """A run on its actors. ``launch`` makes one.

    run       what it was launched with
    schedule  the schedule of a training step, as it is performed
    next_step number of the step that comes next
    """

    def __init__(self, run: Run, programs: Programs, actors: Actors, name: str) -> None:
        self._actors: Actors | None = actors
        self._name, self._generation = name, 0
        self._failure: str | None = None
        self._stepper: Stepper | None = None
        self._calls: Calls
        self._load(run, programs)

    # --- training ---

    def step(self) -> Report:
        """One compiled training step: every actor performs its row; one call an actor."""
        self._demand_ready()
        start = time.perf_counter()
        results = self._guard(lambda: self._calls.all("run", "train", self.next_step, what=f"step {self.next_step}"))
        return self._commit(results, time.perf_counter() - start)

    def train(
        self, steps: int | None = None, *, on: Callable[[Report | Evaluation], None] | None = None
    ) -> list[Report]:
        """Train ``steps`` steps (None: what is left of the run's) with progress; returns their reports.

        ``on`` is called with every report, and with every evaluation that ``run.eval_every`` asks for.
        """
        count = max(0, self.run.steps - self.next_step) if steps is None else steps
        reports: list[Report] = []
        with display(self.run, self.next_step + count) as shown:
            for outcome in self._train(count):
                shown.show(outcome)
                if on is not None:
                    on(outcome)
                if isinstance(outcome, Report):
                    reports.append(outcome)
        return reports

    def evaluate(self, steps: int | None = None) -> Evaluation:
        """The loss on validation data: ``steps`` (None: ``run.eval_steps``) times ``run.microbatches`` microbatches."""
        self._demand_ready()
        if isinstance(self.run.data, Batches) and self.run.data.validate is None:
            raise ConfigError(["data has no validation batches: give Batches a validate function"])
        count = self.run.eval_steps if steps is None else steps
        if count < 1:
            raise ValueError(f"an evaluation of {count} steps has no loss: ask for at least 1")
        start, losses, tokens = time.perf_counter(), list[float](), 0
        for number in range(count):
            call = partial(self._calls.all, "run", "evaluate", number, what=f"evaluation {number}")
            for result in self._guard(call):
                losses += result.losses
                tokens += result.tokens
        return Evaluation(self.next_step, sum(losses) / len(losses), tokens, time.perf_counter() - start)

    def stepper(self) -> Stepper:
        """The next training step, action by action."""
        self._demand_ready()
        self._stepper = Stepper(self.schedule, self.next_step, self._handles, self._calls, self._guard, self._commit)
        return self._stepper

    # --- looking inside ---

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shape of every logical parameter."""
        return {name: shape for shapes in self._shapes for name, shape in shapes.items()}

    def param(self, name: str) -> Tensor:
        """A weight by its logical name, fetched from the actor that holds it."""
        weight: Tensor = self._ask(name, "parameter")
        return weight

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight with its logical name, one actor's after the other; both ends of a tie, if they are apart.

        A copy goes by the name of its home.
        """
        from raypar.actors.models.build import build_model

        homes = {copy: home for home, copy in build_model(self.run.model, self.run.seed).ties}
        for handle, rank in zip(self._handles, range(len(self._handles)), strict=True):
            ref = handle.parameters.remote()
            for name, weight in self._guard(partial(self._calls.gather, [ref], "fetching weights", [rank]))[0].items():
                yield homes.get(name, name), weight

    def grad(self, name: str) -> Tensor | None:
        """A gradient of the latest step as the optimizer saw it (summed, clipped); None before the first step."""
        gradient: Tensor | None = self._ask(name, "gradient")
        return gradient

    def ledger(self) -> dict[str, dict[tuple[str, str], Entry]]:
        """What every actor's groups moved since the launch: calls and bytes by (axis, op)."""
        tables = self._guard(lambda: self._calls.all("ledger", what="reading the ledger"))
        return {
            self.run.mesh.label(rank): {key: Entry(*counts) for key, counts in table.items()}
            for rank, table in enumerate(tables)
        }

    def timeline(self) -> Timeline:
        """The latest training step as measured, in seconds from its first action."""
        rows = self._guard(lambda: self._calls.all("events", what="reading the timeline"))
        zero = min((start for row in rows for _, start, _ in row), default=0.0)
        events = [
            Event(rank, self.run.mesh.label(rank), action, start - zero, end - zero)
            for rank, row in enumerate(rows)
            for action, start, end in row
        ]
        return Timeline(self.schedule, tuple(sorted(events, key=lambda event: event.start)))

    # --- its life ---

    def reset(self, run: Run) -> None:
        """Begin another run on the same actors: any model, data and schedule that fit a mesh of the same shape."""
        self._demand_ready()
        if run.mesh != self.run.mesh:
            raise ConfigError([f"reset keeps the actors: the mesh must stay {self.run.mesh}; launch anew for another"])
        self._load(run, check_run(run))

    def close(self) -> None:
        """End the actors, and Ray if the launch started it; more than once does no harm."""
        if self._actors is not None:
            actors, self._actors = self._actors, None
            self._failure = self._failure or "the job was closed"
            actors.end()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---

    def _load(self, run: Run, programs: Programs) -> None:
        self._generation += 1
        self.run, self.schedule, self.next_step = run, programs["train"], 0
        self._stepper = None
        self._calls = Calls(self._handles, run.mesh, run.timeout)
        plans = [self._plan(run, programs, rank) for rank in range(run.mesh.size)]
        refs = [handle.start.remote(plan) for handle, plan in zip(self._handles, plans, strict=True)]
        launch = Calls(self._handles, run.mesh, max(run.timeout, _LAUNCH_SECONDS))
        self._shapes: list[dict[str, tuple[int, ...]]] = self._guard(lambda: launch.gather(refs, "the launch"))

    def _plan(self, run: Run, programs: Programs, rank: int) -> Plan:
        pp = run.mesh.coordinate(rank)["pp"]
        return Plan(
            name=f"{self._name}@{self._generation}",
            mesh=run.mesh,
            rank=rank,
            model=run.model,
            data=rooted(run.data),
            optim=run.optim,
            programs={name: only_row(schedule, pp) for name, schedule in programs.items()},
            split=run.split,
            recompute=run.recompute,
            micro_batch_size=run.micro_batch_size,
            clip=run.clip,
            seed=run.seed,
            steps=run.steps,
            threads=run.threads,
            timeout=run.timeout,
        )

    def _train(self, count: int) -> Iterator[Report | Evaluation]:
        last = self.next_step + count
        while self.next_step < last:
            yield self.step()
            every = self.run.eval_every
            if every and self.next_step % every == 0 and self.next_step < self.run.steps:
                yield self.evaluate()

    def _commit(self, results: list[Any], seconds: float) -> Report:
        """The step counts once every actor has reported it."""
        lr = lr_at(self.run.optim, self.next_step, self.run.steps)
        report = report_of(self.next_step, lr, seconds, results)
        self.next_step += 1
        return report

    def _ask(self, name: str, method: str) -> Any:
        self._demand_open()
        for rank, shapes in enumerate(self._shapes):
            if name in shapes:
                ref = getattr(self._handles[rank], method).remote(name)
                return self._guard(partial(self._calls.gather, [ref], f"fetching {name}", [rank]))[0]
        close = difflib.get_close_matches(name, self.parameters, n=3)
        raise KeyError(
            f"no parameter {name!r}: {'did you mean ' + ', '.join(close) if close else 'see job.parameters'}"
        )

    @property
    def _handles(self) -> list[Any]:
        self._demand_open()
        assert self._actors is not None
        return self._actors.handles

    def _demand_open(self) -> None:
        if self._failure is None and (self._actors is None or not self._actors.reachable()):
            self._failure = "the Ray that its actors lived in was shut down"
        if self._failure is not None:
            raise JobError(f"this job is over ({self._failure}): launch the run again")

    def _demand_ready(self) -> None:
        self._demand_open()
        if self._stepper is not None and self._stepper.midway:
            raise JobError("a stepper is in the middle of this step: call its finish() first")

    def _guard(self, call: Callable[[], T]) -> T:
        """Run a call on the actors; a fault ends the job, so that nothing is left waiting or running."""
        self._demand_open()
        try:
            return call()
        except NonFiniteError:
            raise  # nobody has changed a weight: the job can go on
        except KeyboardInterrupt:
            # the actors go on with what they were told: the same step once more would be taken twice
            self._failure = "it was interrupted while its actors worked"
            self.close()
            raise
        except JobError as error:
            self._failure = str(error).splitlines()[0]
            self._calls.abort()
            self.close()
            raise
