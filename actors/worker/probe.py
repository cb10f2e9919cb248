"""What a worker holds: its stages and the values between them; how they are saved, looked at and put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from raypar.actors.checkpoint.snapshot import Read, buffer_name
from raypar.actors.inspect.activations import Sight, Spot, Watch
from raypar.actors.inspect.recording import Tape
from raypar.actors.inspect.step import Held, Notes, Seen
from raypar.actors.optim.step import ballot_of
from raypar.actors.pipeline.p2p import Courier
from raypar.actors.pipeline.stage import Stage
from raypar.actors.tensors import Values, nbytes
from raypar.actors.worker.base import Member
from raypar.actors.worker.build import Assembly
from raypar.schedules.action import Action


class Resident(Member):
    """The part of a Worker that stays from one action to the next."""

    _parts: Assembly
    _stages: Mapping[int, Stage]
    _courier: Courier
    _dp: int
    _cp: int

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[Action, Values] = {}  # what an action provided and another one still needs

    # --- a step by hand ---

    def open(self, step: int) -> None:
        """Open a training step that is taken by hand: what it makes can be looked at, and it can be taken again."""
        super().open(step)
        assert self._notes is not None
        self._notes.remember(self._buffers())  # forwards change them

    def peek(self, action: Action, tensors: bool) -> Seen:
        """What an action of this step has made; its figures, and on demand the values too. KeyError if it is not
        done, or makes nothing."""
        assert self._notes is not None
        made = self._notes.made[action]
        in_flight = sum(len(stage.in_flight) for stage in self._stages.values())
        return Seen.of(self._label, action, made, in_flight, self._place.peak(), tensors=tensors)

    def held(self) -> Held:
        """What this actor holds now."""
        dp = self._plan.run.mesh.dp
        return replace(
            super().held(),
            values={action: sum(map(nbytes, values)) for action, values in self._held.items()},
            in_flight={
                number: tuple(microbatch // dp for microbatch in stage.in_flight)
                for number, stage in self._stages.items()
            },
        )

    def record(self, stage: int) -> None:
        """Record what a stage does in the step that was opened, of which it has done nothing yet."""
        others = {id(p) for number, one in self._stages.items() if number != stage for p in one.parameters().values()}
        own = {name: p for name, p in self._stages[stage].parameters().items() if id(p) not in others}
        microbatches = self._plan.programs["train"].num_microbatches
        self._stages[stage].listener = Tape(self._stages[stage].state(), own, microbatches)

    def recording(self, stage: int) -> tuple[tuple[int, ...], list[str], dict[str, Tensor]]:
        """What was recorded: the stage's layers, its actions in their order, and all tensors."""
        tape = self._stages[stage].listener
        assert isinstance(tape, Tape)
        return self._stages[stage].layers, tape.actions, tape.tensors

    def watch(self) -> tuple[str, ...]:
        """Keep what the layers make in the step that was opened, and the gradients there; the logical names of them,
        and of the modules in them that are watched too."""
        part, names = self._parts.part, list[str]()
        for stage in self._stages.values():
            layers = [part.model.names[index] for index in stage.layers]
            whole = stage.is_last and self._plan.run.mesh.cp == 1  # else its loss is that of some tokens
            watch = Watch(dict(zip(layers, stage.modules, strict=True)), part.outputs, keeps_loss=whole)
            stage.listener = watch
            names += watch.names
        return tuple(names)

    def sights(self, spots: Sequence[Spot]) -> list[Sight | None]:
        """What is here of tensors that were watched; None for those that did not come by."""
        watches = [stage.listener for stage in self._stages.values() if isinstance(stage.listener, Watch)]
        return [next((watch.seen[spot] for watch in watches if spot in watch.seen), None) for spot in spots]

    def _restore(self, notes: Notes) -> None:
        self._courier.drain()
        if (reducer := self._parts.reducer) is not None:
            serving = self._plan.world.servers > 0 and not notes.updated  # they wait for the gradients of this step
            reducer.settle(whole=serving)
            if serving and any(stage.is_last for stage in self._stages.values()):
                reducer.total(ballot_of(0, 0.0, sound=True))
        super()._restore(notes)
        self._load_buffers(notes.read)

    # --- checkpoints ---

    def _saved(self) -> Iterator[tuple[str, Tensor]]:
        if self._first_replica or self._plan.world.sharded:  # others would say the same once more
            yield from super()._saved()
        if self._leads and self._cp == 0:
            yield from self._buffers()

    def _load(self, read: Read) -> None:
        super()._load(read)
        self._load_buffers(read)

    def _load_buffers(self, read: Read) -> None:
        for stage in self._stages.values():
            for name, buffer in stage.buffers().items():
                for dp in (self._dp, 0):  # there may have been fewer replicas
                    if (saved := read(buffer_name(dp, name), "")) is not None:
                        buffer.copy_(saved)
                        break

    @property
    def _first_replica(self) -> bool:
        return self._dp == self._cp == 0

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for stage in self._stages.values():
            yield from ((buffer_name(self._dp, name), buffer) for name, buffer in stage.buffers().items())
