"""Low-rank adapters of linear layers, and layers that are called with them.

Shapes: E inputs of a layer, F its outputs, r rank of an adapter.

Source: Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor, nn

from raypar.actors.layers.linear import SharedInputLinears, linear_of
from raypar.actors.specs.lora import Adaptable
from raypar.actors.specs.model import Transformer

Adapted: TypeAlias = tuple[nn.Linear, "LoraAdapter | None"]


class LoraAdapter(nn.Module):
    """A low-rank adapter: (..., E) -> (..., F).

    Args:
        spec: The model, which has adapters.
        layer: The layer that it adapts.

    Attributes:
        a, b: Its two linear layers, without biases: E to r, r to F.
    """

    def __init__(self, spec: Transformer, layer: nn.Linear) -> None:
        super().__init__()
        assert spec.lora is not None
        linear, rank = linear_of(spec.linear), spec.lora.rank
        self.a = linear(layer.in_features, rank, bias=False)
        self.b = linear(rank, layer.out_features, bias=False)
        self.scale = spec.lora.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.widened(self.a(x))

    def widened(self, h: Tensor) -> Tensor:
        """Return the outputs for the outputs of ``a``, (..., r) -> (..., F)."""
        out: Tensor = self.b(h) * self.scale
        return out


class SummedLinear(nn.Linear):
    """A linear layer that is divided over actors, whose outputs are sums over them."""

    def with_added(self, input: Tensor, added: Tensor | None) -> Tensor:
        """Apply the layer, and add ``added`` (..., F), this actor's part of a further term, before the sum."""
        raise NotImplementedError


def adapter_of(spec: Transformer, layer: nn.Linear, name: Adaptable) -> LoraAdapter | None:
    """Return the adapter of a linear layer; None if the model has none there.

    Args:
        spec: The model.
        layer: The layer.
        name: Its name in a block.
    """
    return LoraAdapter(spec, layer) if spec.lora is not None and name in spec.lora.layers else None


def fanned(fan: SharedInputLinears, x: Tensor, layers: Sequence[Adapted]) -> list[Tensor]:
    """Call layers, and the first halves of their adapters, on one input, and return the outputs of each.

    Args:
        fan: Calls the layers.
        x: The input (..., E).
        layers: The layers, each with its adapter or None.
    """
    adapters = [adapter for _, adapter in layers]
    outs = fan(x, *(layer for layer, _ in layers), *(adapter.a for adapter in adapters if adapter is not None))
    narrow, pairs = iter(outs[len(layers) :]), zip(outs, adapters, strict=False)
    return [out if adapter is None else out + adapter.widened(next(narrow)) for out, adapter in pairs]


def applied(layer: nn.Linear, adapter: LoraAdapter | None, x: Tensor) -> Tensor:
    """Call a layer with its adapter, if it has one: (..., E) -> (..., F)."""
    if adapter is None:
        out: Tensor = layer(x)
    elif isinstance(layer, SummedLinear):
        out = layer.with_added(x, adapter(x))
    else:
        out = layer(x) + adapter(x)
    return out
