"""The state that an actor keeps between steps, and how it is saved, loaded and restored."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raypar.actors.checkpoint.assembler import ShardFolder, ShardSource
from raypar.actors.checkpoint.logical import Logical
from raypar.actors.checkpoint.memory_snapshot import Slots
from raypar.actors.checkpoint.reports import Written
from raypar.actors.checkpoint.snapshot import AVERAGE, SCALER, Copies, Read, buffer_name, logical_name, reader
from raypar.actors.inspect.step import Notes
from raypar.actors.models.tiles.tile_names import tile_of, untiled
from raypar.actors.optim.loss_scale import LossScaler
from raypar.actors.optim.optimizer import STATE_KEYS
from raypar.actors.optim.step import ParameterUpdate, Updater
from raypar.actors.optim.votes import PendingReport, ReadBallot
from raypar.actors.pipeline.stage import Stage
from raypar.actors.relayout.handover import WantedTensor, boxes_of_parts, wanted_parts
from raypar.actors.relayout.moves import Boxes
from raypar.actors.sharding import Part, Shape, Shard, Sharding
from raypar.actors.specs.results import Updated
from raypar.actors.tensor_parallel.gradients import is_first_holder
from raypar.actors.worker.build.model_part import ModelPart
from raypar.actors.worker.build.rank_context import RankContext

_PART = "part"  # the key, in the notes of a step, of a master that is a span of a weight


class StateTensor(NamedTuple):
    """A tensor of an actor's state.

    Attributes:
        weight: The actor's name of the weight that it is or belongs to; for other tensors, the name in a checkpoint.
        kept: The key of an optimizer state of the weight; "" if it is none.
        tensor: The tensor.
        shard: The part of its logical tensor that it is; None for the whole.
        is_saved: Whether it is in this actor's share of a checkpoint.
    """

    weight: str
    kept: str
    tensor: Tensor
    shard: Shard | None
    is_saved: bool


class SpeculativeUpdate(NamedTuple):
    """An update that was made before all stages have reported their gradients.

    Attributes:
        step: Number of the step.
        vote: Their report.
        notes: The state before the update, if it was made.
    """

    step: int
    vote: PendingReport
    notes: Notes


@dataclass(eq=False)
class WorkerState:
    """An actor's parameters, their optimizer state, and the buffers of its stages.

    Attributes:
        context: The actor's rank, device and groups.
        part: Its pipeline rank's part of the model.
        parameters: The parameters that this actor holds, by logical name.
        update: Their update at the end of a step.
        stages: The actor's stages by number; empty for a parameter server.
        scaler: The scale of the loss.
        masters: The weights that this actor updates, by logical name. In half precision they are not
            ``parameters``.
    """

    context: RankContext
    part: ModelPart
    parameters: Mapping[str, nn.Parameter]
    update: ParameterUpdate
    stages: Mapping[int, Stage]
    scaler: LossScaler

    def __post_init__(self) -> None:
        self.masters, self.storage = self.part.masters.parameters, self.part.storage
        self._stored_names = {copy: stored for stored, copy in self.part.model.ties}
        self._copies = Copies(self.storage)

    def holds(self) -> dict[str, Shard]:
        """Return, by logical name, the part of each parameter that this actor holds."""
        return {name: self._held(name) for name in self.parameters}

    def updates(self) -> dict[str, Shard]:
        """Return, by logical name, the part of each parameter that this actor updates."""
        return {name: self._part(name) or Shard(tuple(master.shape)) for name, master in self.masters.items()}

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of all stages, and the frozen parameters that change, with their names in a checkpoint."""
        for stage in self.stages.values():
            yield from ((buffer_name(self.context.dp, name), buffer) for name, buffer in stage.buffers().items())

    def put_buffers_back(self) -> None:
        """Restore the values of ``buffers`` at the beginning of the present step."""
        for stage in self.stages.values():
            stage.step_buffers.settle(taken=False)

    def zero_grad(self) -> None:
        """Drop the gradients of the step before."""
        for parameter in chain(self.part.parameters.values(), self.masters.values()):
            parameter.grad = None

    def take(self, step: int, ballot: ReadBallot, change: Callable[[], object] | None = None) -> Updated:
        """Update the weights at the end of a step, or restore the buffers if the step is not taken.

        Otherwise running statistics would keep non-finite values.

        Args:
            step: Number of the step.
            ballot: See ``Updater.step``.
            change: See ``Updater.step``. Only an ``Updater`` takes one.

        Raises:
            NonFiniteError: See ``Updater.step``.
        """
        taken = False
        try:
            if change is None:
                updated = self.update.step(step, ballot)
            else:
                assert isinstance(self.update, Updater)
                updated = self.update.step(step, ballot, change)
            taken = not updated.is_skipped
            return updated
        finally:
            for stage in self.stages.values():
                stage.step_buffers.settle(taken=taken)

    def begin_update(self, step: int, ballot: Tensor | None) -> SpeculativeUpdate:
        """Update the weights before the other stages have agreed; ``conclude_update`` finds out whether they do.

        Args:
            step: Number of the step.
            ballot: See ``Updater.step``.
        """
        assert isinstance(self.update, Updater)
        vote, notes = self.update.begin(ballot), Notes()
        if vote.is_plain:
            self.remember(notes)
            self.update.apply(step)
        for stage in self.stages.values():
            stage.step_buffers.speculate()
        return SpeculativeUpdate(step, vote, notes)

    def conclude_update(self, speculative: SpeculativeUpdate) -> tuple[Updated, bool]:
        """Wait for the reports of all stages on an update, and repeat it if it was wrong.

        Returns:
            The result of ``take``, and whether the weights, and the outputs of forwards since, are right.

        Raises:
            NonFiniteError: See ``Updater.step``.
        """
        assert isinstance(self.update, Updater)
        updated, is_right = self.update.conclude(
            speculative.step, speculative.vote, lambda: self.restore(speculative.notes)
        )
        for stage in self.stages.values():
            stage.step_buffers.conclude(taken=not updated.is_skipped, is_right=is_right)
        return updated, is_right

    def use_averages(self, *, use: bool) -> None:
        """Replace the weights of all actors by their averages, or restore them; see ``Updater.use_averages``.

        Raises:
            ActionError: A communication failed.
        """
        self.context.device.enter()
        with self.context.reports("averages of weights"):
            self.update.use_averages(use=use)
            self.context.synchronize()

    def masters_apart(self) -> list[nn.Parameter]:
        """Return the masters that are not among the weights that this actor holds for its layers."""
        held, views = {id(weight) for weight in self.part.held}, self.part.masters.views
        return [one for name, one in self.masters.items() if id(one) not in held and name not in views]

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the weights by logical name that have gradients: masters, and layers' weights without a master."""
        whole = {name: parameter for name, parameter in self.parameters.items() if name not in self.part.cuts}
        return {**whole, **self.masters}

    # --- checkpoints ---

    def make_room(self) -> None:
        """Allocate the memory for the copies of ``stage``, in a thread."""
        self._copies.make_room(self._share()[0].items())

    def stage(self, *, weights_only: bool = False) -> None:
        """Copy this actor's share of a checkpoint, or of its weights alone, for ``write``.

        Afterwards training may continue.
        """
        self.context.device.enter()
        tensors, shards = self._share(weights_only=weights_only)
        self._copies.take(tensors.items(), shards)

    def write(self, folder: str, *, beside: bool) -> Written | None:
        """Write the copy as a shard. It may run in another thread than the steps.

        Args:
            folder: Folder of the checkpoint.
            beside: Whether steps run meanwhile; then only idle cores are used.

        Returns:
            The shard's file and slices; None if this actor has nothing to write.

        Raises:
            CheckpointError: The copy can't be written.
        """
        file = f"{self.context.label.replace('=', '').replace(' ', '-')}.safetensors"
        return self._copies.write(Path(folder), file, beside=beside)

    def keep(self, slots: Slots, step: int, copied: Callable[[], None]) -> None:
        """Take a snapshot of this actor's share of the state after ``step`` steps; see ``Slots.take``."""
        self.context.device.enter()
        tensors, shards = self._share()
        slots.take(step, tensors.items(), shards, self.storage.accessible, copied)

    def load(self, source: ShardSource, tensors: Mapping[str, Logical]) -> None:
        """Load the weights, optimizer state and buffers of a checkpoint or a snapshot.

        Args:
            source: Where its shards are read from.
            tensors: Its logical tensors by name.

        Raises:
            CheckpointError: It can't be read.
        """
        self.adopt(reader(source, tensors, self._stored_names, self._own))

    def adopt(self, read: Read) -> None:
        """Load the weights, optimizer state and buffers that a function returns for ``wanted_tensors``."""
        self.context.device.enter()
        with torch.no_grad():
            self._load_weights(read)
            self._load_buffers(read)

    def rewind_to(self, folder: str, tensors: Mapping[str, Logical], step: int, bad: int) -> None:
        """Load a checkpoint, and skip the data of all steps from there to a non-finite one.

        Args:
            folder: Folder of the checkpoint.
            tensors: The checkpoint's logical tensors by name.
            step: Number of steps before it, which is the next step's number.
            bad: Number of the step that was not finite.

        Raises:
            CheckpointError: The checkpoint can't be read.
        """
        used = bad + self.scaler.left_out
        self.load(ShardFolder(Path(folder)), tensors)
        self.scaler.left_out = used + 1 - step

    # --- another layout ---

    def pieces(self) -> Iterator[tuple[str, Shard | None, Tensor]]:
        """Yield this actor's whole state: logical name, part of the logical tensor (None for all), and the tensor.

        Unlike its share of a checkpoint it includes tensors that other actors have too.
        """
        self.context.device.enter()
        whole = self._whole()
        for one in self._state():
            if one.kept or one.weight not in whole or one.tensor is self.parameters[one.weight]:
                yield self._stored_as(one.weight, one.kept), one.shard, one.tensor

    def wanted_tensors(self) -> Iterator[WantedTensor]:
        """Yield the tensors that ``adopt`` reads, if they exist."""
        updated = [weight for weight, kept, _ in self.update.state() if not kept]
        every = dict.fromkeys([*(key for keys in STATE_KEYS.values() for key in keys), AVERAGE])
        wanted = [(name, "") for name in self.parameters] + [(name, key) for name in updated for key in every]
        for weight, kept in wanted:
            yield WantedTensor(weight, kept, (self._stored_as(weight, kept),), partial(self._own, weight, kept))
        yield WantedTensor(SCALER, "", (SCALER,), Sharding().part)
        for stage in self.stages.values():
            for buffer in {**stage.buffers(), **stage.frozen()}:
                own = buffer_name(self.context.dp, buffer)
                either = own, buffer_name(0, buffer)  # there may have been fewer replicas
                yield WantedTensor(own, "", either, Sharding().part)

    def wanted(self, shapes: Mapping[str, Shape]) -> Boxes:
        """Return the parts of logical tensors that ``load`` reads, given the shapes of all existing tensors."""
        return boxes_of_parts(wanted_parts(self.wanted_tensors(), shapes).values())

    def _stored_as(self, weight: str, kept: str = "") -> str:
        """Return the logical name of a weight, or of its optimizer state, in a checkpoint."""
        whole = untiled(weight)
        return logical_name(self._stored_names.get(whole, whole), kept)

    # --- a step by hand ---

    def remember(self, notes: Notes) -> None:
        """Copy weights and optimizer state into the notes, before a STEP changes them."""
        kept = ((logical_name(weight, kept), tensor) for weight, kept, tensor in self.update.state() if kept)
        cut = ((name, one) for name, one in self.parameters.items() if name in self.part.cuts)
        apart = (name for name in self.part.parts if self.masters[name] is not self.parameters.get(name))
        parts = ((logical_name(name, _PART), self.masters[name]) for name in apart)
        whole = ((name, one) for name, one in self.weights().items() if name not in self.part.parts)
        notes.remember(chain(whole, cut, parts, kept), self.storage.copied)
        notes.remember([(SCALER, self.scaler.numbers())])
        notes.updated = True

    def restore(self, notes: Notes) -> None:
        """Restore the state in the notes."""
        with torch.no_grad():
            if notes.updated:
                self._load_weights(notes.read)
            self._load_buffers(notes.read)

    # --- inside ---

    def _state(self) -> Iterator[StateTensor]:
        """Yield this actor's whole state, including tensors that other actors have too."""
        context, updated = self.context, set[str]()
        for weight, kept, tensor in self.update.state():
            updated.add(weight)
            shard = self._part(weight) if tensor.dim() else None
            yield StateTensor(weight, kept, tensor, shard, self.is_saver(weight, tensor))
        if not context.plan.run.precision.is_mixed:  # else the layers' weights do not have the dtype of a checkpoint
            for name, parameter in self.parameters.items():
                if name not in updated or name in self._whole():
                    yield StateTensor(name, "", parameter, self._shard(name), is_saved=False)
        if context.leads and context.cp == 0:
            yield from (StateTensor(name, "", buffer, None, is_saved=True) for name, buffer in self.buffers())
        if context.plan.rank in context.world.trainers and (context.plan.run.counts_skips or not self.scaler.is_fresh):
            yield StateTensor(SCALER, "", self.scaler.numbers(), None, is_saved=context.plan.rank == 0)

    def _share(self, *, weights_only: bool = False) -> tuple[dict[str, Tensor], dict[str, Shard]]:
        """Return this actor's share of a checkpoint, or of its weights alone, by name in the checkpoint.

        Returns:
            The tensors, and the parts of logical tensors that those are that are not whole.
        """
        state = (one for one in self._state() if one.is_saved and not (weights_only and one.kept))
        share = {logical_name(one.weight, one.kept): self._saved(one) for one in state}
        shards = {name: shard for name, (_, shard) in share.items() if shard is not None}
        return {name: tensor for name, (tensor, _) in share.items()}, shards

    def _saved(self, one: StateTensor) -> tuple[Tensor, Shard | None]:
        """Return what this actor saves of a tensor, and its part of the logical tensor; None for the whole.

        Copies of the model divide what each of them has of a span.
        """
        if one.shard is None or one.shard.elements is None:
            return one.tensor, one.shard
        cut, elements = self.part.cuts[one.weight], math.prod(one.shard.shape)
        span, held = cut.stored_span(elements), one.shard.elements[0]
        assert span is not None, "an actor without a part of it does not save it"
        tensor = one.tensor.detach()[span[0] - held : span[1] - held]
        return tensor, replace(one.shard, elements=span, cut=cut.stored(elements))

    def _whole(self) -> Collection[str]:
        """Return the weights of which this actor updates a span, and has all in the dtype of a checkpoint."""
        is_mixed = self.context.plan.run.precision.is_mixed
        return () if is_mixed or self.part.gathers else self.part.parts

    def _own(self, weight: str, kept: str, shape: Shape) -> Part:
        """Return the part of a logical tensor of some shape that this actor loads.

        The optimizer needs its own part of a state. Layers need all that the actor's tensor group leaves to it of a
        weight, unless they gather it.
        """
        part, updated = self._sharding(weight).part(shape), self.part.parts.get(weight)
        if updated is None or not shape or not (kept or self.part.gathers):
            return part
        return part._replace(elements=updated.elements, order=updated.order)

    def _sharding(self, weight: str) -> Sharding:
        """Return what this actor's tensor group leaves to it of a weight and of its optimizer state."""
        tile, shard = tile_of(weight), self.part.shards.get(weight)
        sharding = Sharding() if tile is None else Sharding({0: tile})
        return sharding if shard is None else sharding.then(shard.sharding)

    def _held(self, weight: str) -> Shard:
        """Return the part of a weight that this actor always keeps; a tile is a tensor of its own here."""
        shard = self.part.shards.get(weight) or Shard(tuple(self.part.parameters[weight].shape))
        return self._span(weight, shard) if self.part.gathers else shard

    def _span(self, weight: str, shard: Shard) -> Shard:
        """Return the part that this actor updates of a shard of a weight: all of it, or a span."""
        part = self.part.parts.get(weight)
        return shard if part is None else replace(shard, elements=part.elements, order=part.order)

    def _shard(self, weight: str) -> Shard | None:
        """Return the part of its logical tensor that the layers have of a weight; None for the whole."""
        if (tile := tile_of(weight)) is not None:
            shape = self.part.parameters[weight].shape
            return Shard((tile.count * shape[0], *shape[1:]), Sharding({0: tile}))
        return self.part.shards.get(weight)

    def _part(self, weight: str) -> Shard | None:
        """Return the part of its logical tensor that this actor updates of a weight; None for the whole."""
        shard, part = self._shard(weight), self.part.parts.get(weight)
        return shard if part is None else self._span(weight, shard or Shard(part.whole))

    def is_saver(self, weight: str, tensor: Tensor) -> bool:
        """Return whether this actor saves a weight that it updates, and its state, or a part of them.

        Replicas save spans of what they divide; of equal copies of anything else, the first is saved. A tied weight is
        saved under one of its names. In a tensor group, the first holder of a part saves it.
        """
        context, is_expert = self.context, weight in self.part.owners.experts
        if weight in self._stored_names:
            return False
        part = self.part.parts.get(weight)
        if part is not None and part.elements is not None:
            span = self.part.cuts[weight].stored_span(math.prod(part.whole))
            if span is None or (not tensor.dim() and span[0]):
                return False  # the replica with the first element saves a number
        elif not (context.has_first_copy_of_experts if is_expert else context.has_first_copy):
            return False
        if (tile := tile_of(weight)) is not None:
            return context.leads and (bool(tensor.dim()) or tile.own == (0,))
        if is_expert and context.world.mesh.folds_experts:
            return True
        return (
            context.leads
            if not tensor.dim() or self._shard(weight) is None
            else is_first_holder(self.part.partial.get(weight, ()))
        )

    def _load_weights(self, read: Read) -> None:
        for name, parameter in self.parameters.items():
            weight = read(name, "")
            assert weight is not None, "the driver has looked at names and shapes"
            master = self.masters.get(name, parameter)
            for each in {id(one): one for one in (parameter, master)}.values():
                with self.storage.accessible([each], writes=True):
                    part = self.part.parts.get(name) if each is master and not self.part.gathers else None
                    each.copy_(weight if part is None else part.take(weight))
        for name in self.part.parts:
            if (kept := read(name, _PART)) is not None:
                with self.storage.accessible([self.masters[name]], writes=True):
                    self.masters[name].copy_(kept)
        self.part.masters.publish()
        self.update.load(read)
        if (numbers := read(SCALER, "")) is not None:
            self.scaler.load(numbers)

    def _load_buffers(self, read: Read) -> None:
        for stage in self.stages.values():
            for name, buffer in {**stage.buffers(), **stage.frozen()}.items():
                for dp in (self.context.dp, 0):  # the checkpoint may have fewer replicas
                    if (saved := read(buffer_name(dp, name), "")) is not None:
                        stage.load_buffer(buffer, saved)
                        break
