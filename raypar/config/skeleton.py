"""A run's model without its weights: what the driver has to know of it, built once a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from raypar.actors.specs.model import GPT, Layers, Llama

if TYPE_CHECKING:
    from torch import Tensor, nn

    from raypar.actors.models.base import Model


class Skeleton:
    """The names, shapes and ties of a run's model. The model is built when one of them is first asked for, and then
    kept: to check a GPT or a Llama takes none of them, and no torch."""

    def __init__(self, spec: GPT | Llama | Layers, seed: int) -> None:
        """``seed`` is for user functions that draw while they build."""
        self._spec, self._seed = spec, seed

    @cached_property
    def model(self) -> Model:
        """The model, whose layers are on the meta device. Raises what the user's own function raises."""
        from raypar.actors.models.build import build_model

        return build_model(self._spec, self._seed)

    @cached_property
    def layers(self) -> Mapping[str, nn.Module]:
        """Every layer on the meta device, by logical name."""
        return dict(zip(self.model.names, self.model.skeleton, strict=True))

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        """Every logical parameter that trains, on the meta device; a tied weight once, under its home."""
        every = {
            f"{layer}.{inner}": p for layer, module in self.layers.items() for inner, p in module.named_parameters()
        }
        return {name: every[name] for name in self.model.parameter_names()}

    @cached_property
    def buffers(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every buffer that is saved, by logical name."""
        return dict(self._buffers())

    @cached_property
    def homes(self) -> Mapping[str, str]:
        """The home of every tied weight that is a copy, by the copy's name."""
        return {copy: home for home, copy in self.model.ties}

    def _buffers(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for layer, module in self.layers.items():
            stored = module.state_dict()
            yield from (
                (f"{layer}.{inner}", tuple(buffer.shape)) for inner, buffer in module.named_buffers() if inner in stored
            )
