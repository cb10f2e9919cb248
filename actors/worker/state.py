"""What an actor holds of the model from step to step, and how it is saved, loaded and put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from raypar.actors.checkpoint.logical import Logical
from raypar.actors.checkpoint.snapshot import Copies, Read, Written, buffer_name, logical_name, reader
from raypar.actors.inspect.step import Notes
from raypar.actors.optim.step import Update
from raypar.actors.pipeline.stage import Stage
from raypar.actors.sharding import Shard
from raypar.actors.tensor_parallel.gradients import first_of
from raypar.actors.worker.build import Part
from raypar.actors.worker.seat import Seat


class WorkerState:
    """The weights of an actor, what their optimizer keeps, and the buffers of its stages.

    parameters  by logical name: those of the part that are here
    update      how a step of them ends
    stages      by number; a parameter server has none
    """

    def __init__(
        self,
        seat: Seat,
        part: Part,
        parameters: Mapping[str, nn.Parameter],
        update: Update,
        stages: Mapping[int, Stage],
    ) -> None:
        self.parameters, self.update, self.stages = parameters, update, stages
        self._seat, self._shards, self._partial = seat, part.shards, part.partial
        self._homes = {copy: home for home, copy in part.model.ties}
        self._copies = Copies()

    def holds(self) -> dict[str, Shard]:
        """What this actor holds of which logical parameters."""
        return {name: self._shards.get(name) or Shard(tuple(p.shape)) for name, p in self.parameters.items()}

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of the stages, under the names that a checkpoint gives them."""
        for stage in self.stages.values():
            yield from ((buffer_name(self._seat.dp, name), buffer) for name, buffer in stage.buffers().items())

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        for parameter in self.parameters.values():
            parameter.grad = None

    # --- checkpoints ---

    def make_room(self) -> None:
        """Get memory for what ``stage`` copies ready, beside the next steps."""
        self._copies.make_room(self._saved())

    def stage(self) -> None:
        """Copy what this actor puts into a checkpoint, for ``write``; training may go on then."""
        self._seat.place.enter()
        shards = {
            logical_name(weight, kept): shard
            for weight, kept, tensor in self.update.state()
            if (shard := self._shard(weight, tensor)) is not None
        }
        self._copies.take(self._saved(), shards)

    def write(self, folder: str, *, beside: bool) -> Written | None:
        """Write the copy as a shard, in another thread than the steps.

        Args:
            folder: where the shard goes.
            beside: whether steps go on, so that the writing gives way to them.

        Returns:
            The shard's file and slices; None if this actor has nothing to write.

        Raises:
            CheckpointError: the copy can't be written.
        """
        file = f"{self._seat.label.replace('=', '').replace(' ', '-')}.safetensors"
        return self._copies.write(Path(folder), file, beside=beside)

    def load(self, folder: str, tensors: Mapping[str, Logical]) -> None:
        """Go on with a checkpoint's weights, optimizer state and buffers.

        Raises:
            CheckpointError: the checkpoint can't be read.
        """
        self._seat.place.enter()
        with torch.no_grad():
            read = self._own(reader(Path(folder), tensors, self._homes))
            self._load_weights(read)
            self._load_buffers(read)

    # --- a step by hand ---

    def remember(self, notes: Notes) -> None:
        """Copy weights and optimizer state into the notes: a STEP is about to change them."""
        notes.remember(self.parameters.items())
        notes.remember((logical_name(weight, kept), tensor) for weight, kept, tensor in self.update.state() if kept)
        notes.updated = True

    def restore(self, notes: Notes) -> None:
        """Put back what the notes remember."""
        with torch.no_grad():
            if notes.updated:
                self._load_weights(notes.read)
            self._load_buffers(notes.read)

    # --- inside ---

    def _saved(self) -> Iterator[tuple[str, Tensor]]:
        """What this actor puts into a checkpoint: the weights that it updates, tied ones as their home only; of what is
        the same on several of a tensor group or on all replicas, the first one's."""
        if self._seat.dp == self._seat.cp == 0 or self._seat.world.sharded:
            for weight, kept, tensor in self.update.state():
                if weight not in self._homes and self._speaks(weight, tensor):
                    yield logical_name(weight, kept), tensor
        if self._seat.leads and self._seat.cp == 0:
            yield from self.buffers()

    def _own(self, read: Read) -> Read:
        """Reads what is here of what ``read`` reads."""

        def own(weight: str, kept: str = "") -> Tensor | None:
            whole = read(weight, kept)
            shard = None if whole is None or not whole.dim() else self._shards.get(weight)
            return whole if whole is None or shard is None else shard.take(whole).clone()

        return own

    def _shard(self, weight: str, tensor: Tensor) -> Shard | None:
        """Return which part of a logical tensor a weight or its optimizer state is; None for all of it."""
        return self._shards.get(weight) if tensor.dim() else None

    def _speaks(self, weight: str, tensor: Tensor) -> bool:
        """Whether this actor is the first of its tensor group that has a weight, or its part of it."""
        return self._seat.leads if self._shard(weight, tensor) is None else first_of(self._partial.get(weight, ()))

    def _load_weights(self, read: Read) -> None:
        for name, parameter in self.parameters.items():
            weight = read(name, "")
            assert weight is not None, "the driver has looked at names and shapes"
            parameter.copy_(weight)
        self.update.load(read)

    def _load_buffers(self, read: Read) -> None:
        for stage in self.stages.values():
            for name, buffer in stage.buffers().items():
                for dp in (self._seat.dp, 0):  # there may have been fewer replicas
                    if (saved := read(buffer_name(dp, name), "")) is not None:
                        buffer.copy_(saved)
                        break
