"""What a worker needs to know of a model: its layers by logical name, their weights, its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.models.partition import split_layers
from raypar.actors.sharding import Cut
from raypar.actors.specs.types import Split
from raypar.actors.tensors import Values

IGNORED = -100  # the ignore_index of torch's losses over classes
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
CrossEntropy = Callable[[Tensor, Tensor], Tensor]  # logits (T, V), labels (T,) -> the sum over tokens, a scalar

Kind = Literal[
    "enter", "column", "row", "vocab", "heads", "logits", "drop", "table", "norm", "copy", "gather", "dropout", "shared"
]
TensorPlan = tuple[tuple[str, Kind], ...]
Divide = Callable[[str, nn.Module], Mapping[str, Cut]]


def undivided(name: str, layer: nn.Module) -> Mapping[str, Cut]:
    """All of a layer stays on one actor."""
    return {}


class Model(ABC):
    """A list of layers. Layer i's parameters are called ``names[i] + "." + <name inside the layer>``.

    skeleton  every layer on the meta device: names and shapes without memory
    names     logical name of each layer
    body      the layers that a split counts; what stands before goes to the first stage, what stands behind to the last
    costs     relative cost of each layer of the body
    ties      pairs (home, copy) of parameters that are one logical weight
    tensor_plan    what tensor parallelism makes of modules, by a pattern of their names: see TensorParallel
    halves    whether linear layers may make their weights' gradients later, or elsewhere: see Linears
    cross_entropy  of tokens; where the vocabulary is divided, so is this
    """

    names: tuple[str, ...]
    body: range
    costs: tuple[float, ...]
    ties: tuple[tuple[str, str], ...] = ()
    tensor_plan: TensorPlan = ()
    halves: bool = True

    def __init__(self, skeleton: Sequence[nn.Module]) -> None:
        self.skeleton = skeleton
        self.cross_entropy: CrossEntropy = partial(F.cross_entropy, ignore_index=IGNORED, reduction="sum")

    @abstractmethod
    def materialize(self, layers: Sequence[int], seed: int, divide: Divide = undivided) -> list[nn.Module]:
        """These layers with their initial weights: the same bits whichever other layers are asked for.

        ``divide`` is called with the name of each and the layer, before it has weights: it may replace modules, and
        says what of which parameters is to be here, by their names in the layer.
        """

    @abstractmethod
    def loss(self, output: Values, target: Values) -> Tensor:
        """The mean loss of a microbatch, a scalar, from the last layer's output."""

    def count(self, target: Values) -> int:
        """The elements of a target that its loss is the mean of; those of a signed integer target that are -100 are
        left out.

        -100 is what torch's losses over classes ignore.
        """
        first = target[0]
        return int((first != IGNORED).sum()) if first.dtype in _SIGNED else first.numel()

    def stages(self, split: Split, num_stages: int) -> tuple[range, ...]:
        """The layers of each stage."""
        parts = [
            range(part.start + self.body.start, part.stop + self.body.start)
            for part in split_layers(split, self.costs, num_stages)
        ]
        parts[0] = range(parts[0].stop)
        parts[-1] = range(parts[-1].start, len(self.names))
        return tuple(parts)

    def parameter_names(self) -> tuple[str, ...]:
        """Every logical parameter that trains, in the model's order; a tied weight once, under its home."""
        copies = {copy for _, copy in self.ties}
        return tuple(
            name
            for layer, module in zip(self.names, self.skeleton, strict=True)
            for name in (f"{layer}.{inner}" for inner, p in module.named_parameters() if p.requires_grad)
            if name not in copies
        )
