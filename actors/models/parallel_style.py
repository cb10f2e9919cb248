"""Parallel styles: how a mesh axis changes one kind of module, and how it shards the module's tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from raypar.actors.collective.group import Groups
from raypar.actors.layers.dropout import sharded_dropout
from raypar.actors.layers.linear_cross_entropy import Vocabulary
from raypar.actors.models.base import CrossEntropy, Kind
from raypar.actors.models.placed_step import PlacedStep
from raypar.actors.sharding import Shard, Sharding


class Applied(NamedTuple):
    """The result of a style for a module.

    Attributes:
        module: The module that replaces the original; it may be the same one.
        shards: This actor's part of each sharded parameter, by the parameter's name in the module.
        partial: The groups over which a parameter's gradient must be summed, because each member has a partial one; by
            the parameter's name in the module.
        outputs: Sharding of the output of the module (under "") and of modules in it (under their names), as far as a
            parity check can compare them.
        cross_entropy: Replaces the model's cross-entropy, if the module's outputs are sharded logits.
        vocabulary: This actor's part of the vocabulary, if the cross-entropy may be computed from slices of it.
    """

    module: nn.Module
    shards: Mapping[str, Shard] = {}
    partial: Mapping[str, Groups] = {}
    outputs: Mapping[str, Sharding] = {}
    cross_entropy: CrossEntropy | None = None
    vocabulary: Vocabulary | None = None


class ParallelStyle(ABC):
    """How a mesh axis changes one kind of module."""

    @abstractmethod
    def apply(self, name: str, module: nn.Module) -> Applied:
        """Apply the style to a module, before it has weights.

        Args:
            name: Logical name of the module, for messages.
            module: The module. It may be changed in place, or another one may be made from it.
        """


def _accept_layer(name: str, layer: nn.Module) -> None:
    """Find no mistake."""


def _accept_loss(loss: Tensor) -> None:
    """Find no mistake."""


@dataclass(frozen=True)
class AxisStyles:
    """How one mesh axis changes a model: a style for each kind of module.

    Attributes:
        styles: By kind of the model's plan; modules of other kinds stay as they are.
        flow: Sharding of the values between layers.
        partial: Groups over which gradients are partial if no style shards the parameter.
        divides_experts: Whether the axis' ranks have different experts, whose gradients then are not partial.
        placed: Returns the style of a step of a user's plan that places tensors; None: the axis has none.
        guard: Called with the name of each layer and the layer, after the styles were applied, to look for mistakes in
            the user's plan.
        check_loss: Called with the first loss; raises ValueError if it was computed from only a part of the outputs.
    """

    styles: Mapping[Kind, ParallelStyle]
    flow: Sharding = field(default_factory=Sharding)
    partial: Groups = ()
    divides_experts: bool = False
    placed: Callable[[PlacedStep], ParallelStyle] | None = None
    guard: Callable[[str, nn.Module], None] = _accept_layer
    check_loss: Callable[[Tensor], None] = _accept_loss

    def style(self, kind: Kind) -> ParallelStyle | None:
        """Return the style for modules of a kind; None if they stay as they are."""
        if isinstance(kind, PlacedStep):
            return None if self.placed is None else self.placed(kind)
        return self.styles.get(kind)


@dataclass(frozen=True)
class ShardedDropout(ParallelStyle):
    """Let a dropout apply this actor's part of the whole tensor's mask.

    Attributes:
        sharding: Sharding of the dropout's input.
    """

    sharding: Sharding

    def apply(self, name: str, module: nn.Module) -> Applied:
        """Replace the dropout."""
        assert isinstance(module, nn.Dropout)
        return Applied(sharded_dropout(module, self.sharding))


def apply_to_children(name: str, module: nn.Module, styles: Mapping[str, ParallelStyle]) -> Applied:
    """Apply styles to children of a module, which they replace.

    Args:
        name: Logical name of the module.
        module: The parent, which is not replaced.
        styles: By the child's name.

    Returns:
        The parent's result, with the children's names as prefixes.
    """
    shards, partial, outputs = dict[str, Shard](), dict[str, Groups](), dict[str, Sharding]()
    for child, style in styles.items():
        applied = style.apply(f"{name}.{child}", module.get_submodule(child))
        setattr(module, child, applied.module)
        shards |= {f"{child}.{inner}": shard for inner, shard in applied.shards.items()}
        partial |= {f"{child}.{inner}": groups for inner, groups in applied.partial.items()}
        outputs |= {f"{child}.{inner}".rstrip("."): sharding for inner, sharding in applied.outputs.items()}
    return Applied(module, shards, partial, outputs)
