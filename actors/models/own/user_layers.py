"""A model made of the user's own modules."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from raypar.actors.autograd.torch_private import num_writes, storage_id
from raypar.actors.errors import blame
from raypar.actors.hugging_face.weights import FolderWeights
from raypar.actors.models.base import InitialValues, Model, Parallelize, unsharded
from raypar.actors.models.init.deferred_init import (
    Recording,
    as_kind_of,
    named_slots,
    on_meta,
    record,
    seeded,
    slots_of,
)
from raypar.actors.models.init.unregistered import demand_real, has_strays
from raypar.actors.models.own.module_source_lines import made_at, note_copy, noted_lines
from raypar.actors.models.own.synced_batch_norm import with_synced_norms
from raypar.actors.models.own.user_plan import tensor_plan_of
from raypar.actors.rng import derive
from raypar.actors.sharding import Shard
from raypar.actors.specs.model import Layers
from raypar.actors.tensors import Values, is_dense, unwrap

log = logging.getLogger(__name__)

_NO_LAYERS = "model.fn must return a list of nn.Modules, one or more"


class UnfitLayersError(ValueError):
    """The user's function returns something that is no list of modules with known sizes."""


class LayersModel(Model):
    """A model of user layers, called ``layers.0``, ``layers.1``, ...

    A parameter that two layers share is one logical weight. The initial values are those that the user's ``fn`` gives,
    drawn under the run's seed. The user's plan says which modules tensor parallelism divides.

    Args:
        layers: The user's function, loss and plan.
        seed: The run's seed.

    Raises:
        UnfitLayersError: ``fn`` does not return a list of one or more modules, or some of them have no sizes yet.
    """

    def __init__(self, layers: Layers, seed: int) -> None:
        self._spec = layers
        self._sharded = set[int]()  # layers that tensor parallelism has divided
        built, self._recording = _built(layers, seed)
        modules = with_synced_norms(built)
        self.is_deferred = self._recording is not None
        self.names = tuple(f"layers.{i}" for i in range(len(modules)))
        self.body = range(len(modules))
        self.costs = tuple(1.0 + sum(p.numel() for p in module.parameters()) for module in modules)
        self.ties = _shared(self.names, modules)
        self.tensor_plan, self.halves = tensor_plan_of(layers.plan), layers.halves
        self.others_halve = layers.halves
        self.skips = tuple((source, target) for source, target in layers.skips)
        super().__init__(modules)
        # by layer, the tensors by name, because ``make`` replaces those of the skeleton
        named = [named_slots(name, layer) for name, layer in zip(self.names, modules, strict=True)]
        self._tensors = [{name: tensor for *_, name, tensor in slots} for slots in named]
        self._first_names = dict[Tensor, str]()
        for tensors in self._tensors:
            for name, tensor in tensors.items():
                self._first_names.setdefault(tensor, name)
        uses = Counter(tensor for tensors in self._tensors for tensor in set(tensors.values()))
        self._shared = {tensor for tensor, count in uses.items() if count > 1 and not tensor.requires_grad}
        self._made = dict[Tensor, Tensor]()  # of these, those that are made: once for all layers

    def draws(self, layers: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return which tensors of some layers begin with random values; see ``Model.draws``.

        Tensors that share their memory with another one, have gaps, or are not floating-point are missing: they are
        made with the others of their layer.
        """
        found = dict[int, dict[str, Tensor]]()  # by random op, the tensors that depend on it
        for tensor in dict.fromkeys(tensor for index in layers for tensor in self._tensors[index].values()):
            ops = self._random.get(tensor, frozenset())
            joined = {name: one for op in sorted(ops) for name, one in found.get(op, {}).items()}
            joined[self._first_names[tensor]] = tensor
            if ops:
                ops = ops.union(op for op, tensors in found.items() if not joined.keys().isdisjoint(tensors))
            found |= dict.fromkeys(ops, joined)
        return list({id(tensors): tensors for tensors in found.values()}.values())

    def draw(self, tensors: Mapping[str, Tensor], seed: int) -> list[Tensor]:
        """Draw the initial values of whole tensors; see ``Model.draw``."""
        assert self._recording is not None
        return self._recording.values(tensors.values(), seed)

    def make(
        self, layers: Sequence[int], seed: int, parallelize: Parallelize, values: InitialValues | None = None
    ) -> list[nn.Module]:
        """Make some layers with their initial weights; see ``Model.make``."""
        if parallelize is not unsharded:
            return self._materialize_shards(layers, seed, parallelize, values)
        own = [self.skeleton[index] for index in layers]
        slots = [slot for index in layers for slot in named_slots(self.names[index], self.skeleton[index])]
        shared = [(table, inner, tensor) for table, inner, _, tensor in slots if tensor in self._shared]
        for table, inner, tensor in shared:
            table[inner] = self._made.get(tensor, tensor)
        if self._folder is not None:
            self._read(own, layers)
        if values is not None:
            self._take(own, layers, values)
        if self._recording is not None:
            self._recording.materialize(own, seed)
            demand_real(own)
        self._made |= {tensor: table[inner] for table, inner, tensor in shared}
        return own

    def _take(self, own: Sequence[nn.Module], layers: Sequence[int], values: InitialValues) -> None:
        """Take the values of some layers' whole tensors from elsewhere."""
        made: dict[Tensor, Tensor] = {}
        for index, module in zip(layers, own, strict=True):
            for table, inner, _, tensor in named_slots(self.names[index], module):
                name = self._first_names.get(tensor)  # none for a tensor that is made
                if name is not None and name in values:
                    if tensor not in made:
                        made[tensor] = as_kind_of(tensor, values.part(name, Shard(tuple(tensor.shape))))
                    table[inner] = made[tensor]

    def _materialize_shards(
        self, layers: Sequence[int], seed: int, parallelize: Parallelize, given: InitialValues | None
    ) -> list[nn.Module]:
        """Make sharded copies of some layers, with this actor's part of each weight.

        Modules of the copies are replaced on the meta device first. Then whole weights are made for one layer at a time
        and sliced, to save memory, but no weights of experts on other actors. The skeleton stays whole, because
        every actor takes names and shapes from it.
        """
        own = _copied(self.skeleton, layers)
        whole = {name: tensor for index in layers for *_, name, tensor in named_slots(str(index), own[str(index)])}
        with on_meta():  # in one call, so that a module that two layers share is replaced once
            named = parallelize("layers", own)
        shards = {id(whole[name]): shard for name, shard in named.items()}
        names = {id(tensor): f"layers.{name}" for name, tensor in whole.items()}
        made = {id(tensor): one for tensor, one in self._made.items()}
        for index in layers:
            slots = [slot for slot in named_slots(str(index), own[str(index)]) if slot[2] in whole]
            new = {id(whole[name]): whole[name] for *_, name, _ in slots if id(whole[name]) not in made}
            read = {key: tensor for key, tensor in new.items() if self._folder is not None and _is_weight(tensor)}
            for key, tensor in read.items():
                part = self._part(names[key], tensor, shards.get(key, Shard(tuple(tensor.shape))))
                made[key] = as_kind_of(tensor, part)
            for key, tensor in new.items():
                if given is not None and (name := self._first_names[tensor]) in given:
                    shard = shards.get(key, Shard(tuple(tensor.shape)))
                    made[key] = as_kind_of(tensor, given.part(name, shard))
            new = {key: tensor for key, tensor in new.items() if key not in made}
            values = new.values() if self._recording is None else self._recording.values(new.values(), seed)
            for (key, tensor), value in zip(new.items(), values, strict=True):
                part = value if key not in shards else shards[key].take(value).clone()
                made[key] = tensor if part is tensor else as_kind_of(tensor, part)
            for table, inner, name, _ in slots:
                table[inner] = made[id(whole[name])]
        self._made |= {tensor: made[id(tensor)] for tensor in self._shared if id(tensor) in made}
        self._sharded |= {int(name.partition(".")[0]) for name in named}
        demand_real(list(own.values()), [tensor for tensor in whole.values() if made.get(id(tensor)) is not tensor])
        return [own[str(index)] for index in layers]

    @cached_property
    def _random(self) -> dict[Tensor, frozenset[int]]:
        """The random ops that tensors depend on, for those that have some and are alone and dense in their memory."""
        if self._recording is None:
            return {}
        uses = Counter(map(storage_id, self._first_names))
        alone = [
            tensor
            for tensor in self._first_names
            if tensor.is_meta and tensor.is_floating_point() and is_dense(tensor)
            if uses[storage_id(tensor)] == 1 and not (self._folder is not None and _is_weight(tensor))
        ]
        return {one: ops for one, ops in zip(alone, self._recording.draws(alone), strict=True) if ops}

    @cached_property
    def _folder(self) -> FolderWeights | None:
        """The weights that the layers begin with; None if they are random."""
        return None if self._spec.hf is None else FolderWeights(Path(self._spec.hf))

    def _read(self, own: Sequence[nn.Module], layers: Sequence[int]) -> None:
        """Read the whole weights of some layers from the folder."""
        made: dict[int, Tensor] = {}
        for index, module in zip(layers, own, strict=True):
            for table, inner, name, tensor in named_slots(self.names[index], module):
                if _is_weight(tensor) and tensor.is_meta:
                    if id(tensor) not in made:
                        made[id(tensor)] = as_kind_of(tensor, self._part(name, tensor, Shard(tuple(tensor.shape))))
                    table[inner] = made[id(tensor)]

    def _part(self, name: str, tensor: Tensor, shard: Shard) -> Tensor:
        """Read this actor's part of a weight from the folder."""
        assert self._folder is not None
        part = torch.empty(shard.shape, dtype=tensor.dtype)
        self._folder.fill(self.originals.get(name, name), part, shard)
        return part

    def note(self, layer: int, error: Exception) -> str:
        """Return the note to add to an error that a layer raised; a sharded layer's often has a typical cause."""
        note = super().note(layer, error)
        if (line := made_at(error)) is not None:
            blame(error, line)
        if layer not in self._sharded or type(error) is not RuntimeError:  # torch's own; others raise subclasses
            return note
        return (
            "(of what a column linear layer makes, an actor has only a part: view it with -1, or count the features "
            f"and heads that are there, and end with a row linear layer) {note}"
        )

    def count(self, target: Values) -> int:
        """Call the user's function, if there is one. Raises ValueError if it does not return a number of elements."""
        if self._spec.count is None:
            return super().count(target)
        counted = self._spec.count(unwrap(target))
        number = counted.item() if isinstance(counted, Tensor) and counted.numel() == 1 else counted
        if not isinstance(number, int) or number < 0:
            fix = "return of how many elements the loss is the mean, as an int"
            raise ValueError(f"model.count returns {counted!r}: {fix}")
        return int(number)

    def loss(self, output: Values, target: Values) -> Tensor:
        """Call the user's loss function. Raises ValueError if it does not return one floating number."""
        try:
            loss: Tensor = self._spec.loss(unwrap(output), unwrap(target))
        except Exception as error:
            error.add_note("(in the loss)")
            raise
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            fix = "return the mean over the microbatch"
            raise ValueError(f"the loss must be one floating number, it is {shape}: {fix}")
        return loss.reshape(())

    def metrics(self, output: Values, target: Values) -> Values:
        """Call the user's metrics; see ``Model.metrics``. Raises what ``user_metric`` raises."""
        found = [user_metric(name, one, output, target, self.count) for name, one in self._spec.metrics.items()]
        return (torch.stack(found),) if found else ()


def user_metric(
    name: str, metric: Callable[[Any, Any], Any], output: Values, target: Values, count: Callable[[Values], int]
) -> Tensor:
    """Compute a metric of the user's for a microbatch.

    Args:
        name: Its name.
        metric: The user's function.
        output: The last layer's output.
        target: The targets.
        count: Returns the number of elements of the targets that a mean averages over.

    Returns:
        Its sum and the number of elements in it, (2,) float64.

    Raises:
        ValueError: The metric writes into its arguments, or returns anything but a number or a pair of numbers.
    """
    before = [*map(num_writes, (*output, *target))]
    try:
        made = metric(unwrap(output), unwrap(target))
    except Exception as error:
        error.add_note(f"(in the metric {name!r})")
        raise
    if before != [*map(num_writes, (*output, *target))]:
        raise ValueError(f"the metric {name!r} writes into the output or the target: let it make new tensors")
    pair = made if isinstance(made, tuple | list) else (made, 1)
    if len(pair) != 2 or not all(map(_is_number, pair)):
        raise ValueError(f"the metric {name!r} returns neither one number, a mean, nor (sum, count)")
    times = 1 if pair is made else count(target)
    sums = [torch.as_tensor(one, dtype=torch.float64, device=output[0].device).reshape(()) for one in pair]
    return torch.stack(sums) * times


def _is_number(value: object) -> bool:
    """Return whether a value is one real number: of Python or numpy, or a tensor with one element."""
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())


def _built(layers: Layers, seed: int) -> tuple[list[nn.Module], Recording | None]:
    """Build the user's modules, if possible without their weights.

    Returns:
        The modules on the meta device and the recording that makes their weights; or, if the build can't be recorded,
        the modules with their weights and None.
    """
    try:
        with noted_lines():
            modules, recording = record(layers.fn, seed)
        _demand_fit(modules)
        if not has_strays(modules):
            return modules, recording
        reason = "it has tensors that are more than a parameter, a buffer or an attribute"
    except UnfitLayersError:
        raise
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        reason = str(error)  # for example, it reads values of its tensors
    real = _build_real(layers, seed)
    log.info("the model can't be built without its weights (%s); every actor builds all of it, for a moment", reason)
    return real, None


def _demand_fit(built: Sequence[object]) -> None:
    """Raise UnfitLayersError unless these are one or more modules, all of which know their sizes."""
    modules = [module for module in built if isinstance(module, nn.Module)]
    if not built or len(modules) < len(built):
        kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in built)) or "nothing"
        fix = "make a module of what is none, nn.ReLU() of torch.relu, say" if built else "put one into it"
        raise UnfitLayersError(f"{_NO_LAYERS}, and its list has {kinds}: {fix}")
    if unsized := [*_unsized(modules)]:
        raise UnfitLayersError("\n".join(unsized))


def _unsized(modules: Sequence[nn.Module]) -> Iterator[str]:
    """Yield a fault for each module that learns its sizes from its first batch."""
    for index, module in enumerate(modules):
        for path, part in module.named_modules(prefix=f"layers.{index}"):
            if any(map(is_lazy, [*part.parameters(recurse=False), *part.buffers(recurse=False)])):
                kind = type(part).__name__
                yield (
                    f"model.fn: {path} is a {kind}, which learns its sizes from its first batch, and actors divide the "
                    f"weights before: give {kind.removeprefix('Lazy')} with its sizes"
                )


def _build_real(layers: Layers, seed: int) -> list[nn.Module]:
    """Build the user's modules with their weights. Raises UnfitLayersError as ``LayersModel`` does."""
    with noted_lines(), seeded(derive(seed, "build")):
        built = layers.fn()
    if not isinstance(built, Iterable):
        fix = "put it into a list" if isinstance(built, nn.Module) else "return [nn.Linear(4, 1)], say"
        raise UnfitLayersError(f"{_NO_LAYERS}, and it returns {type(built).__name__}: {fix}")
    modules = list(built)
    _demand_fit(modules)
    return modules


def _copied(modules: Sequence[nn.Module], layers: Sequence[int]) -> nn.ModuleDict:
    """Copy some modules, without copying their tensors. Submodules that they share, the copies share too.

    Returns:
        The copies by index, as strings.
    """
    chosen = [modules[index] for index in layers]
    parts = [part for module in chosen for part in module.modules()]
    kept = {id(tensor): tensor for part in parts for _, _, tensor in slots_of(part)}
    copies = deepcopy(chosen, kept)
    for module, copy in zip(chosen, copies, strict=True):
        note_copy(module, copy)
    return nn.ModuleDict(dict(zip(map(str, layers), copies, strict=True)))


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _shared(names: Sequence[str], modules: Sequence[nn.Module]) -> tuple[tuple[str, str], ...]:
    """Return the pairs (original, copy) of trainable parameters that several layers share.

    Frozen ones are left out: their copies stay equal anyway.
    """
    originals: dict[int, str] = {}
    ties = []
    for layer, module in zip(names, modules, strict=True):
        for inner, parameter in module.named_parameters():
            name = f"{layer}.{inner}"
            original = originals.setdefault(id(parameter), name)
            if original != name and parameter.requires_grad:
                ties.append((original, name))
    return tuple(ties)
