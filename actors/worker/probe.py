"""Inspection of one actor: its progress, its weights and gradients, and the values of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from raypar.actors.data_parallel.reducer import Reducer
from raypar.actors.inspect.activations import OutputWatch, Sight, Spot
from raypar.actors.inspect.profile import StepProfiler
from raypar.actors.inspect.recording import Tape
from raypar.actors.inspect.step import ActorContents, ComputedValue, Look
from raypar.actors.machine.high_water import HighWater
from raypar.actors.sharding import Shard
from raypar.actors.specs.results import Kind, Progress, Span
from raypar.actors.specs.types import KEPT
from raypar.actors.tensors import nbytes, sum_dtype
from raypar.actors.worker.build.rank_context import RankContext
from raypar.actors.worker.build.step import StepState
from raypar.actors.worker.state import WorkerState
from raypar.schedules.action import Action


@dataclass(eq=False)
class Probe:
    """Inspects one actor without changing a number of the run.

    Attributes:
        context: The actor's rank, device and groups.
        state: The actor's state.
        reducer: Sums gradients over replicas; None if there are none to sum.
        older: The bytes of older versions of weights; None in a synchronous schedule.
        step: The latest step that was begun.
        cache_bytes: Bytes of the keys and values of a generation under way.
        process: Bytes that the actor's process had before it took part in a run; 0 if it computes on a GPU.
        sequences: Of each group of a generation, the number of sequences and the positions of their caches.
    """

    context: RankContext
    state: WorkerState
    reducer: Reducer | None = None
    older: HighWater | None = None
    step: StepState = field(default_factory=StepState)
    cache_bytes: int = 0
    process: int = 0
    sequences: tuple[tuple[int, int], ...] = ()
    _taken: tuple[int, dict[Kind, int]] | None = None  # of the latest training step: its peak, temporary memory by kind
    _trained: deque[list[Span]] = field(default_factory=lambda: deque(maxlen=KEPT))  # of training steps, latest first
    _is_idle: bool = False

    # --- progress and times ---

    def progress(self) -> Progress:
        """Return how far this actor is. Safe to call from another thread."""
        step = self.step
        return Progress(step.number, len(step.events), step.now, self._is_idle, step.program)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Return a context in which the actor reports itself as idle: it waits without a deadline."""
        self._is_idle = True
        try:
            yield
        finally:
            self._is_idle = False

    def close(self, events: list[Span]) -> None:
        """Close a training step: store its memory and its spans (not those of a step by hand, because of its pauses).

        Args:
            events: Spans of the step, in seconds.
        """
        self._taken = self._memory_of_step()
        if self.step.notes is None:
            self._trained.appendleft(events)
        self.step.notes = None

    def events(self, ago: int = 0) -> list[Span]:
        """Return the spans of a compiled training step.

        Args:
            ago: How many steps before the latest.

        Returns:
            The spans in seconds; [] if they are not stored.
        """
        return self._trained[ago] if 0 <= ago < len(self._trained) else []

    def ledger(self) -> dict[tuple[str, str], tuple[int, int, float]]:
        """Return calls, bytes and seconds by (axis, op) since the run began."""
        # The groups share one ledger, or each has its own.
        tables = [group.ledger.entries() for group in self.context.groups.values()]
        return {key: (entry.calls, entry.bytes, entry.seconds) for table in tables for key, entry in table.items()}

    # --- weights and gradients ---

    def parameters(self) -> dict[str, Tensor]:
        """Return this actor's weights by logical name, on the host."""
        return {name: parameter.detach().cpu() for name, parameter in self.state.parameters.items()}

    def parameter(self, name: str) -> Tensor:
        """Return one of this actor's weights by logical name, on the host."""
        return self.state.parameters[name].detach().cpu()

    def masters(self) -> dict[str, Tensor]:
        """Return the weights that this actor's optimizer updates by logical name, on the host."""
        return {name: master.detach().cpu() for name, master in self.state.masters.items()}

    def master(self, name: str) -> Tensor | None:
        """Return one of ``masters``, on the host; None if another actor updates it."""
        master = self.state.masters.get(name)
        return None if master is None else master.detach().cpu()

    def fixed(self, name: str) -> Tensor | None:
        """Return a frozen parameter or a buffer by logical name, on the host; None if it is not on this actor."""
        tensor = self.state.part.fixed().get(name)
        return None if tensor is None else tensor.detach().cpu()

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of one weight as the optimizer saw it, on the host; None if there is none.

        It is summed over the step and the replicas, and clipped.
        """
        weight = self.state.weights().get(name)  # of a small one, this actor may have no part
        return None if weight is None or weight.grad is None else weight.grad.cpu()

    def parts(
        self, what: Literal["master", "parameter", "gradient"], names: Sequence[str] | None = None
    ) -> dict[str, tuple[Shard, Tensor]]:
        """Return the parts of weights or of gradients that this actor has, by logical name, on the host.

        Args:
            what: The method that returns the tensor of one parameter; "parameter" if each is a part.
            names: Logical names of parameters; None for all that this actor updates.
        """
        found, method = {}, {"master": self.master, "parameter": self.parameter, "gradient": self.gradient}[what]
        for name, shard in self.state.updates().items():
            if names is None or name in names:
                tensor = method(name)
                if tensor is not None:
                    found[name] = shard, tensor
        return found

    def gradients(self, names: Sequence[str]) -> list[Tensor | None]:
        """Return gradients by logical name, as ``gradient`` does for one, in the order of ``names``."""
        return [self.gradient(name) for name in names]

    # --- a step by hand ---

    def peek(self, action: Action, tensors: bool) -> ComputedValue:
        """Return the values that an action of a step by hand has computed; none if a frozen stage needs no gradient.

        Args:
            action: An action that was performed.
            tensors: Whether to return the values too, and not only their statistics.

        Raises:
            KeyError: The action is not done.
        """
        assert self.step.notes is not None
        values = self.step.notes.made.get(action, ())
        if not values and not any(event.action == action for event in self.step.events):
            raise KeyError(str(action))
        in_flight = sum(len(stage.in_flight) for stage in self.state.stages.values())
        kept = tuple(value.detach().cpu() for value in values) if tensors else ()
        looks = tuple(map(Look.at, values))
        return ComputedValue(self.context.label, action, looks, in_flight, self.context.device.peak(), kept)

    def memory(self) -> dict[Kind, int]:
        """Return the bytes that this actor holds now, by kind; kinds that the run cannot have are left out."""
        storage, held, masters = self.state.storage, self.state.part.held, self.state.masters_apart()
        states = [tensor for _, kept, tensor in self.state.update.state() if kept]
        own = (*held, *masters) if self.reducer is None else self._unreduced()
        gradients = sum(nbytes(p.grad) for p in own if p.grad is not None)
        if self.reducer is not None:
            gradients += self.reducer.num_bytes
        away = {id(one) for one in (*held, *masters, *states) if storage.is_off_device and storage.holds(one)}
        offloaded = sum(nbytes(one) for one in (*held, *masters, *states) if id(one) in away)
        found: dict[Kind, int] = {
            "weights": sum(nbytes(one) for one in held if id(one) not in away),
            "gradients": 0 if storage.is_off_device else gradients,
            "optimizer": sum(nbytes(one) for one in (*states, *masters) if id(one) not in away),
            **{kind: held.now for kind, held in self._temporary()},
        }
        if self.cache_bytes:
            found["cache"] = self.cache_bytes
        return found | ({"offloaded": offloaded + gradients} if storage.is_off_device else {})

    def most(self) -> dict[Kind, int]:
        """Return the largest bytes by kind within the latest training step, in which every weight has a gradient."""
        gradients = sum(p.numel() * sum_dtype(p).itemsize for p in self._unreduced())
        if self.reducer is not None:
            gradients += self.reducer.num_bytes
        whole: dict[Kind, int] = {} if self.state.storage.is_off_device else {"gradients": gradients}
        return self.memory() | whole | self._memory_of_training()[1]

    def before(self) -> dict[Kind, int]:
        """Return what the actor's process had before the run; {} on a GPU, whose memory is counted without it."""
        return {"process": self.process} if self.process else {}

    def _memory_of_step(self) -> tuple[int, dict[Kind, int]]:
        """Return the peak of the latest step, and the largest temporary memory in it, by kind."""
        return self.context.device.peak(), {kind: held.most for kind, held in self._temporary()}

    def _memory_of_training(self) -> tuple[int, dict[Kind, int]]:
        """Return the memory of the latest training step, which evaluations may have followed."""
        return self._memory_of_step() if self.step.is_train or self._taken is None else self._taken

    def _unreduced(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are in no bucket, such as those of experts on this actor only."""
        reduced = frozenset[str]() if self.reducer is None else self.reducer.names
        return [p for name, p in self.state.parameters.items() if name not in reduced]

    def _temporary(self) -> Iterator[tuple[Kind, HighWater]]:
        """Yield the counters of this actor's temporary memory, by kind."""
        if self.state.part.gathered is not None:
            yield "gathered", self.state.part.gathered
        if self.reducer is not None and self.reducer.bucket_bytes is not None:
            yield "buckets", self.reducer.bucket_bytes
        if self.older is not None:
            yield "versions", self.older
        hosts = [stage.host.held for stage in self.state.stages.values() if stage.host is not None]
        if hosts:
            yield "offloaded", hosts[0]  # all stages have the same counter

    def held(self) -> ActorContents:
        """Return the sizes of everything that this actor holds now."""
        dp = self.context.world.mesh.dp
        return ActorContents(
            self.context.label,
            now=self.memory(),
            most=self.most(),
            values={action: sum(map(nbytes, values)) for action, values in self.step.values.items()},
            in_flight={
                number: tuple(microbatch // dp for microbatch in stage.in_flight)
                for number, stage in self.state.stages.items()
            },
            memory=self._memory_of_training()[0],
            has_trained=self.step.is_train or self._taken is not None,
            sequences=self.sequences,
            process=self.process,
        )

    def record(self, stage: int) -> None:
        """Start recording a stage in the step that was opened, before the stage has done anything."""
        stages = self.state.stages
        others = {id(p) for number, one in stages.items() if number != stage for p in one.parameters().values()}
        own = {name: p for name, p in stages[stage].parameters().items() if id(p) not in others}
        microbatches = self.context.plan.programs["train"].numbers_a_step
        stages[stage].listener = Tape(stages[stage].state(), own, microbatches)

    def recording(self, stage: int) -> tuple[tuple[int, ...], list[str], dict[str, Tensor]]:
        """Return a stage's recording.

        Returns:
            Indices of the stage's layers; the recorded calls in their order, such as ``F3``; all tensors by name (see
            ``Tape``).
        """
        tape = self.state.stages[stage].listener
        assert isinstance(tape, Tape)
        return tuple(self.state.stages[stage].layers), tape.actions, tape.tensors

    def watch(self) -> tuple[str, ...]:
        """Start storing the outputs of layers and their gradients, in the step that was opened.

        Returns:
            Logical names of the watched layers, and of the watched modules inside them.
        """
        names, part = list[str](), self.state.part
        for stage in self.state.stages.values():
            layers = [part.model.names[index] for index in stage.layers]
            whole = stage.is_last and self.context.world.mesh.cp == 1  # with cp, the loss covers only some tokens
            watch = OutputWatch(dict(zip(layers, stage.modules, strict=True)), part.outputs, keeps_loss=whole)
            stage.listener = watch
            names += watch.names
        return tuple(names)

    def sights(self, spots: Sequence[Spot]) -> list[Sight | None]:
        """Return this actor's part of each of these watched tensors; None where it has none."""
        stages = self.state.stages.values()
        watches = [stage.listener for stage in stages if isinstance(stage.listener, OutputWatch)]
        return [next((watch.seen[spot] for watch in watches if spot in watch.seen), None) for spot in spots]


def profiler_of(context: RankContext) -> StepProfiler:
    """Return what records the training steps of an actor that its run asks for."""
    plan = context.plan
    return StepProfiler(plan.run.profile, plan.profiles, context.label, plan.rank, context.world.size, context.device)
