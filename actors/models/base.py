"""Base class of all models: the layers by logical name, how to make their weights, and the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from functools import cached_property, partial
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.layers.attention.token_slices import TokenSlices
from raypar.actors.layers.documents import Documents
from raypar.actors.layers.linear_cross_entropy import Labels
from raypar.actors.models.init.deferred_init import as_kind_of, slots_of
from raypar.actors.models.module_tree import modules_named
from raypar.actors.models.partition import split_layers
from raypar.actors.models.placed_step import PlacedStep
from raypar.actors.sharding import Shard
from raypar.actors.specs.types import Split
from raypar.actors.tensors import Values, cast_floating

IGNORED = -100  # the ignore_index of torch's losses over classes
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
CrossEntropy = Callable[[Tensor, Tensor], Tensor]  # logits (T, V), labels (T,) -> the sum over tokens, a scalar

Named = Literal[  # a kind of module, as parallel styles distinguish them
    "vocab",  # the embedding of token ids
    "table",  # a module that computes one row for every position
    "norm",
    "drop",  # dropout of the values between layers
    "enter",  # a module whose input several linear layers in it take
    "heads",  # attention
    "column",  # a linear layer whose outputs are sharded
    "row",  # a linear layer whose inputs are sharded
    "moe",  # a layer of experts
    "adapter_column",  # an adapter of a linear layer whose outputs are sharded
    "adapter_row",  # an adapter of a linear layer whose inputs are sharded
    "logits",  # the projection to the vocabulary, with which the layer ends
    "copy",  # a linear layer that takes the same input as others
    "gather",  # a module whose sharded output is gathered
    "gather_input",  # a linear layer that takes a sharded tensor whole
    "split_input",  # a linear layer that takes its part of a whole tensor
    "dropout",  # dropout of sharded outputs, in a user's plan
    "shared",  # a module that stays whole although its input is sharded, in a user's plan
    "expert",  # a list of experts, which actors divide
]
Kind = Named | PlacedStep
TensorPlan = tuple[tuple[str, Kind], ...]
Parallelize = Callable[[str, nn.Module], Mapping[str, Shard]]
Change = Callable[[Sequence[int], Sequence[nn.Module]], list[nn.Module]]  # indices of layers, and the layers


class InitialValues(Protocol):
    """Initial values of tensors that come from elsewhere than the model."""

    def __contains__(self, name: object) -> bool:
        """Return whether it has the values of a tensor, by the name under which the tensor is drawn."""

    def part(self, name: str, shard: Shard) -> Tensor:
        """Return this actor's part of a tensor, on the CPU; all actors call it in the same order.

        Args:
            name: The name under which the tensor is drawn.
            shard: Which part of the tensor it is.
        """


class Expert(NamedTuple):
    """The expert that a parameter belongs to.

    Attributes:
        number: Its number among the experts of its layer.
        among: Number of experts of its layer.
        list: Logical name of the list of experts.
    """

    number: int
    among: int
    list: str

    def part(self, parts: int, orders: Mapping[str, Sequence[int]] = MappingProxyType({})) -> int:
        """Return which part it belongs to if the experts are divided into equal parts, one slice each.

        Args:
            parts: Number of parts.
            orders: By the name of a list, the order of its experts if that is not by number.
        """
        position = orders[self.list].index(self.number) if self.list in orders else self.number
        return position * parts // self.among


def unsharded(name: str, layer: nn.Module) -> Mapping[str, Shard]:
    """Shard nothing: every parameter of the layer is whole on its actor."""
    return {}


class Model(ABC):
    """A model as a list of layers. Layer i's parameters are called ``names[i] + "." + <name inside the layer>``.

    Args:
        skeleton: Every layer on the meta device: names and shapes without memory.

    Attributes:
        names: Logical name of each layer.
        body: Indices of the layers that a split counts. The layers before them go to the first stage, the layers after
            them to the last.
        costs: Relative cost of each layer of the body.
        ties: Pairs (original, copy) of parameters that are one logical weight.
        tensor_plan: Which parallel style is applied to which modules: pairs of a pattern of logical names and a kind of
            module, in the order of application.
        halves: Whether linear layers may make the gradients of their weights later than those of their inputs, or in
            given memory: see Linears.
        others_halve: Whether other parameters may get their gradients later too, from the graph of the forward: see
            LaterHalf.
        cross_entropy: Cross-entropy of logits (T, V) and labels (T,), summed over tokens. Tensor parallelism replaces
            it where it divides the vocabulary.
        documents: Where documents begin in the present microbatch; None if the layers ignore documents.
        slices: The present slice of a microbatch; None if the layers compute whole sequences only.
        labels: The labels of the present microbatch; None if no layer computes their loss.
        skips: Pairs of layers: the second one takes the output of the first one, one tensor, as a further argument,
            after the output of the layer before it.
        is_deferred: Whether the user's function built the layers on the meta device, so that tensors that
            no layer registers may be left there.
    """

    names: tuple[str, ...]
    body: range
    costs: tuple[float, ...]
    ties: tuple[tuple[str, str], ...] = ()
    tensor_plan: TensorPlan = ()
    halves: bool = True
    others_halve: bool = False
    is_deferred: bool = False
    documents: Documents | None = None
    slices: TokenSlices | None = None
    labels: Labels | None = None
    skips: tuple[tuple[int, int], ...] = ()

    _origin: tuple[Model, Change] | None = None  # the model that this one is a changed copy of, and the change

    def __init__(self, skeleton: Sequence[nn.Module]) -> None:
        self.skeleton = skeleton
        self.cross_entropy: CrossEntropy = partial(F.cross_entropy, ignore_index=IGNORED, reduction="sum")

    def changed(self, change: Change) -> Self:
        """Return a copy of the model in which some modules are replaced; every other attribute stays.

        Args:
            change: Takes indices of layers and the layers, and returns these layers with modules replaced. It is called
                with the skeleton now, and with layers that are made later. It must keep their initial values.
        """
        made = copy(self)
        for name, value in vars(Model).items():
            if isinstance(value, cached_property):
                vars(made).pop(name, None)  # they depend on the skeleton
        tensors = {tensor for module in self.skeleton for part in module.modules() for *_, tensor in slots_of(part)}
        kept = {id(tensor): as_kind_of(tensor, tensor.detach().to("meta")) for tensor in tensors}
        made.skeleton = change(range(len(self.names)), deepcopy(list(self.skeleton), kept))
        made._origin = self, change
        return made

    @property
    def drawn(self) -> Model:
        """The model whose tensors are drawn: the one that this model is a changed copy of, or this model."""
        return self if self._origin is None else self._origin[0].drawn

    def units(self, layers: Sequence[int], size: int) -> Iterator[list[int]]:
        """Yield the layers of each unit of a stage: so many of the body together, every other one alone.

        Args:
            layers: Indices of the layers of the stage.
            size: Layers of a unit of the body.
        """
        body = [index for index in layers if index in self.body]
        yield from ([index] for index in layers if index < self.body.start)
        yield from (body[start : start + size] for start in range(0, len(body), size))
        yield from ([index] for index in layers if index >= self.body.stop)

    def materialize(
        self,
        layers: Sequence[int],
        seed: int,
        parallelize: Parallelize = unsharded,
        values: InitialValues | None = None,
    ) -> list[nn.Module]:
        """Make some layers with their initial weights, also of a copy that ``changed`` returned; see ``make``."""
        if self._origin is None:
            return self.make(layers, seed, parallelize, values)
        model, change = self._origin
        return change(layers, model.materialize(layers, seed, parallelize, values))

    @abstractmethod
    def draws(self, layers: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return which tensors of some layers begin with random values, in the order in which ``make`` makes them.

        Args:
            layers: Indices of the layers.

        Returns:
            Meta tensors by the name under which they are drawn, once each: that of the original of a tied weight.
            Tensors that can only be drawn together are in one mapping.
        """

    @abstractmethod
    def draw(self, tensors: Mapping[str, Tensor], seed: int) -> list[Tensor]:
        """Draw the initial values of whole tensors, on the CPU.

        Args:
            tensors: Some of the mappings' meta tensors that ``draws`` returned, by name.
            seed: The run's seed.

        Returns:
            The tensors in order, with the shapes, strides and dtypes of the meta tensors.
        """

    @abstractmethod
    def make(
        self, layers: Sequence[int], seed: int, parallelize: Parallelize, values: InitialValues | None = None
    ) -> list[nn.Module]:
        """Make some layers with their initial weights, which have the same bits whichever other layers are made.

        Args:
            layers: Indices of the layers.
            seed: The run's seed.
            parallelize: Called with the name of each layer, or of a container of layers, and the module, before it has
                weights. It may replace modules, and returns this actor's part of each sharded parameter, by the name
                inside the module.
            values: The values of some tensors that ``draws`` names; all others are drawn here.

        Returns:
            The layers, on the CPU, in the order of ``layers``.
        """

    def note(self, layer: int, error: Exception) -> str:
        """Return the note to add to an error that a layer raised."""
        return f"(in layers.{layer})"

    @abstractmethod
    def loss(self, output: Values, target: Values) -> Tensor:
        """Return the mean loss of a microbatch, a scalar, from the last layer's output and the target."""

    def metrics(self, output: Values, target: Values) -> Values:
        """Return the user's metrics of a microbatch, one tensor, (metrics, 2) float64; none if there are none.

        A row is a metric's sum and the number of elements in it, from the last layer's output and the target.
        """
        return ()

    @staticmethod
    def no_loss(output: Values) -> Tensor:
        """Return the loss of a microbatch without targets: 0, with gradients of 0 even if outputs are infinite."""
        return torch.stack([value.flatten()[:0].sum(dtype=torch.float32) for value in output]).sum()

    def figures(self, output: Values, target: Values, *, train: bool, is_half: bool) -> Values:
        """Return the loss of a microbatch and, in an evaluation, the user's metrics; see ``loss`` and ``metrics``.

        Args:
            output: The last layer's output.
            target: The targets; none if none of them counts.
            train: Whether it is a step of the training.
            is_half: Whether the output is in half precision. They are computed in fp32 then.
        """
        if not target:
            return (self.no_loss(output),)
        output = cast_floating(output, torch.float32) if is_half else output
        loss = self.loss(output, target)
        return (loss.float() if is_half else loss, *(() if train else self.metrics(output, target)))

    def count(self, target: Values) -> int:
        """Return the number of target elements that the loss is the mean of.

        In a target of signed integers, elements of -100 do not count: torch's losses over classes ignore them.
        """
        first = target[0]
        return int((first != IGNORED).sum()) if first.dtype in _SIGNED else first.numel()

    def stages(self, split: Split, num_stages: int) -> tuple[range, ...]:
        """Return the layer indices of each stage.

        Args:
            split: How to split the body: "even", "balanced", or the number of body layers of each stage.
            num_stages: Number of stages.
        """
        split_body, first = split_layers(split, self.costs, num_stages), self.body.start
        parts = [range(part.start + first, part.stop + first) for part in split_body]
        parts[0] = range(parts[0].stop)
        parts[-1] = range(parts[-1].start, len(self.names))
        return tuple(parts)

    @cached_property
    def originals(self) -> dict[str, str]:
        """Names of the originals of tied weights, by the names of their copies."""
        return {copy: original for original, copy in self.ties}

    @cached_property
    def experts(self) -> dict[str, Expert]:
        """The expert that each parameter of an expert belongs to, by the parameter's logical name, also if frozen."""
        found: dict[str, Expert] = {}
        for path, experts in self.expert_lists.items():
            for number, expert in enumerate(experts):
                names = (f"{path}.{number}.{name}" for name, _ in expert.named_parameters())
                found |= dict.fromkeys(names, Expert(number, len(experts), path))
        return found

    @cached_property
    def expert_lists(self) -> dict[str, nn.ModuleList]:
        """The lists of experts that actors may divide, by logical name."""
        found: dict[str, nn.ModuleList] = {}
        for layer, module in zip(self.names, self.skeleton, strict=True):
            for pattern in (pattern for pattern, kind in self.tensor_plan if kind == "expert"):
                for inner, experts in modules_named(module, layer, pattern):
                    assert isinstance(experts, nn.ModuleList)
                    found[f"{layer}.{inner}".rstrip(".")] = experts
        return found

    def unlike_experts(self) -> list[str]:
        """Return the names of the lists whose experts cannot compute with each other's weights.

        Their shapes differ, or they have buffers.
        """
        return [
            name
            for name, experts in self.expert_lists.items()
            if any(True for _ in experts.buffers())
            or len({tuple((inner, p.shape) for inner, p in expert.named_parameters()) for expert in experts}) > 1
        ]

    def parameter_names(self) -> tuple[str, ...]:
        """Return the names of all trainable parameters in order; a tied weight once, under its original name."""
        return tuple(
            name
            for layer, module in zip(self.names, self.skeleton, strict=True)
            for name in (f"{layer}.{inner}" for inner, p in module.named_parameters() if p.requires_grad)
            if name not in self.originals
        )
