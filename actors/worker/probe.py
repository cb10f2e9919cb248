"""What can be asked of an actor: where it is, what it holds, what it has made."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from raypar.actors.inspect.activations import Sight, Spot, Watch
from raypar.actors.inspect.recording import Tape
from raypar.actors.inspect.step import Held, Seen
from raypar.actors.sharding import Sharding
from raypar.actors.specs.results import Progress, Span
from raypar.actors.specs.types import KEPT
from raypar.actors.tensors import nbytes
from raypar.actors.worker.seat import Seat
from raypar.actors.worker.state import WorkerState
from raypar.actors.worker.step import Step
from raypar.schedules.action import Action


class Probe:
    """The view into one actor; it changes no number of a run.

    names    of the model's layers
    outputs  what is here of the outputs of layers and of some modules in them, by logical name: see Division
    step     the latest one that was begun
    """

    def __init__(self, seat: Seat, state: WorkerState, names: Sequence[str], outputs: Mapping[str, Sharding]) -> None:
        self.step = Step()
        self._seat, self._state, self._names, self._outputs = seat, state, names, outputs
        self._trained: deque[list[Span]] = deque(maxlen=KEPT)  # of compiled training steps, the latest first
        self._is_idle = False

    # --- where it is ---

    def progress(self) -> Progress:
        """Where this actor is; safe to call from another thread."""
        step = self.step
        return Progress(step.number, len(step.events), step.now, self._is_idle)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """The time in which the actor waits, for as long as it takes, for others or for the disk."""
        self._is_idle = True
        try:
            yield
        finally:
            self._is_idle = False

    def close(self, events: list[Span]) -> None:
        """Close a training step: what was done is worth keeping unless somebody paused between the actions."""
        if self.step.notes is None:
            self._trained.appendleft(events)
        self.step.notes = None

    def events(self, ago: int = 0) -> list[Span]:
        """What was done in the latest compiled training step, or in one so many before it; empty if that is not
        known (any more)."""
        return self._trained[ago] if 0 <= ago < len(self._trained) else []

    def ledger(self) -> dict[tuple[str, str], tuple[int, int, float]]:
        """Calls, bytes and seconds by (axis, op) since the run began, as an Entry has them."""
        tables = [group.ledger.entries() for group in self._seat.groups.values()]  # one ledger, or one a group
        return {key: (entry.calls, entry.bytes, entry.seconds) for table in tables for key, entry in table.items()}

    # --- weights and gradients ---

    def parameters(self) -> dict[str, Tensor]:
        """This actor's weights by logical name, on the host."""
        return {name: parameter.detach().cpu() for name, parameter in self._state.parameters.items()}

    def parameter(self, name: str) -> Tensor:
        """One weight, on the host."""
        return self._state.parameters[name].detach().cpu()

    def gradient(self, name: str) -> Tensor | None:
        """One gradient as the optimizer saw it: summed over the step and the replicas, clipped; on the host."""
        gradient = self._state.parameters[name].grad
        return None if gradient is None else gradient.cpu()

    # --- a step by hand ---

    def peek(self, action: Action, *, tensors: bool) -> Seen:
        """What an action of this step has made.

        Args:
            action: one that was performed.
            tensors: whether the values come along, and not only their figures.

        Raises:
            KeyError: the action is not done, or makes nothing.
        """
        assert self.step.notes is not None
        made = self.step.notes.made[action]
        in_flight = sum(len(stage.in_flight) for stage in self._state.stages.values())
        return Seen.of(self._seat.label, action, made, in_flight, self._seat.place.peak(), tensors=tensors)

    def held(self) -> Held:
        """What this actor holds now."""
        parameters, dp = list(self._state.parameters.values()), self._seat.world.mesh.dp
        return Held(
            self._seat.label,
            weights=sum(map(nbytes, parameters)),
            gradients=sum(nbytes(p.grad) for p in parameters if p.grad is not None),
            optimizer=sum(nbytes(tensor) for _, kept, tensor in self._state.update.state() if kept),
            values={action: sum(map(nbytes, values)) for action, values in self.step.values.items()},
            in_flight={
                number: tuple(microbatch // dp for microbatch in stage.in_flight)
                for number, stage in self._state.stages.items()
            },
            memory=self._seat.place.peak(),
        )

    def record(self, stage: int) -> None:
        """Record what a stage does in the step that was opened, of which it has done nothing yet."""
        stages = self._state.stages
        others = {id(p) for number, one in stages.items() if number != stage for p in one.parameters().values()}
        own = {name: p for name, p in stages[stage].parameters().items() if id(p) not in others}
        microbatches = self._seat.plan.programs["train"].num_microbatches
        stages[stage].listener = Tape(stages[stage].state(), own, microbatches)

    def recording(self, stage: int) -> tuple[tuple[int, ...], list[str], dict[str, Tensor]]:
        """What was recorded: the stage's layers, its actions in their order, and all tensors."""
        tape = self._state.stages[stage].listener
        assert isinstance(tape, Tape)
        return self._state.stages[stage].layers, tape.actions, tape.tensors

    def watch(self) -> tuple[str, ...]:
        """Keep what the layers make in the step that was opened, and the gradients there; the logical names of them,
        and of the modules in them that are watched too."""
        names = list[str]()
        for stage in self._state.stages.values():
            layers = [self._names[index] for index in stage.layers]
            whole = stage.is_last and self._seat.world.mesh.cp == 1  # else its loss is that of some tokens
            watch = Watch(dict(zip(layers, stage.modules, strict=True)), self._outputs, keeps_loss=whole)
            stage.listener = watch
            names += watch.names
        return tuple(names)

    def sights(self, spots: Sequence[Spot]) -> list[Sight | None]:
        """What is here of tensors that were watched; None for those that did not come by."""
        stages = self._state.stages.values()
        watches = [stage.listener for stage in stages if isinstance(stage.listener, Watch)]
        return [next((watch.seen[spot] for watch in watches if spot in watch.seen), None) for spot in spots]
