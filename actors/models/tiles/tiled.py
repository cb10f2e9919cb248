"""Tiling: the product of a large linear layer in pieces, each with weights of its own.

Source: Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.1.3 (memory-centric tiling).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from raypar.actors.layers.linear import Linear
from raypar.actors.models.base import Model
from raypar.actors.models.module_tree import replace_modules
from raypar.actors.models.tiles.tile_names import tile_count, tile_name


class TiledLinear(nn.Module):
    """A linear layer that is cut by outputs into tiles: (..., in) -> (..., out).

    Args:
        layer: The layer that it replaces. Its tiles have copies of its rows.
        count: Number of tiles, a divisor of the number of outputs.

    Attributes:
        before: Called with the number of a tile before its product; None if weights are always whole.
        after: Called with the number of a tile and its output; None if weights are always whole.
    """

    def __init__(self, layer: nn.Linear, count: int) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.before: Callable[[int], None] | None = None
        self.after: Callable[[int, Tensor], None] | None = None
        for number in range(count):
            with torch.device("meta"):
                tile = type(layer)(layer.in_features, layer.out_features // count, layer.bias is not None)
            for name, whole in layer.named_parameters(recurse=False):
                tile.register_parameter(name, nn.Parameter(whole.detach().chunk(count)[number].clone()))
            self.add_module(tile_name(number, count), tile)

    def forward(self, input: Tensor) -> Tensor:
        """Compute (..., out) from (..., in), tile by tile."""
        outs = []
        for number, tile in enumerate(self.children()):
            if self.before is not None:
                self.before(number)
            outs.append(tile(input))
            if self.after is not None:
                self.after(number, outs[-1])
        return torch.cat(outs, -1)


def tiled_model(model: Model, patterns: Mapping[str, int]) -> Model:
    """Return a copy of a model some of whose linear layers are cut into tiles, each with parameters of its own.

    Initial values are those of the model that is not tiled.

    Args:
        model: The model.
        patterns: Into how many tiles linear layers are cut, by pattern of their logical names.
    """

    def tiled(layers: Sequence[int], modules: Sequence[nn.Module]) -> list[nn.Module]:
        """Replace the linear layers that are cut, in place; a layer of the model may be one itself."""
        root = nn.ModuleList(modules)
        replacements: dict[nn.Module, nn.Module] = {}
        for index, module in zip(layers, modules, strict=True):
            for linear, count in tiled_layers(model.names[index], module, patterns):
                replacements[linear] = TiledLinear(linear, count)
        replace_modules(root, replacements)
        return list(root)

    return model.changed(tiled)


def tiled_in(layer: nn.Module) -> list[TiledLinear]:
    """Return the tiled linear layers in a layer of a model, in its order."""
    return [module for module in layer.modules() if isinstance(module, TiledLinear)]


def tiled_layers(name: str, layer: nn.Module, patterns: Mapping[str, int]) -> Iterator[tuple[nn.Linear, int]]:
    """Yield the linear layers in a layer of a model that are cut, with the number of their tiles.

    Args:
        name: Logical name of the layer.
        layer: The layer.
        patterns: As in ``tiled_model``.
    """
    for path, module in linears_of(name, layer):
        if (count := tile_count(patterns, path)) > 1:
            yield module, count


def linears_of(name: str, layer: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers in a layer that can be cut, by logical name: plain ones that are trained."""
    for path, module in layer.named_modules(prefix=name):
        if type(module) in (nn.Linear, Linear) and all(p.requires_grad for p in module.parameters(recurse=False)):
            assert isinstance(module, nn.Linear)
            yield path, module
