"""The skeleton of a run's model: its layers without weights, which the driver builds once per run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from raypar.actors.specs.lora import is_adapter
from raypar.actors.specs.model import GPT, Layers, Llama

if TYPE_CHECKING:
    from torch import Tensor, nn

    from raypar.actors.models.base import Model


class Skeleton:
    """Names, shapes and ties of a run's model.

    The model is built, and torch imported, when one of them is first used. The check of a GPT or Llama uses none.

    Args:
        spec: Description of the model.
        seed: Seed for user functions that draw random numbers while they build the model.
    """

    def __init__(self, spec: GPT | Llama | Layers, seed: int) -> None:
        self._spec, self._seed = spec, seed

    def copy(self) -> Skeleton:
        """Return a skeleton with copies of the layers, which may be called: what calls change stays in the copies.

        Raises what the user's own function raises.
        """
        made = Skeleton(self._spec, self._seed)
        with suppress(Exception):  # of an attribute that can't be copied: the layers are built again
            made.model = self.model.changed(lambda _, layers: [*layers])
        return made

    @cached_property
    def model(self) -> Model:
        """The model, with its layers on the meta device. Raises what the user's own function raises."""
        from raypar.actors.models.build import build_model

        return build_model(self._spec, self._seed)

    @cached_property
    def layers(self) -> Mapping[str, nn.Module]:
        """All layers by logical name, on the meta device."""
        return dict(zip(self.model.names, self.model.skeleton, strict=True))

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        """All trainable parameters by logical name, on the meta device; a tied weight once, under its original name."""
        return {name: self._parameters[name] for name in self.model.parameter_names()}

    @cached_property
    def whole(self) -> Mapping[str, Tensor]:
        """As ``weights``, with those that are frozen; without adapters."""
        copies = self.originals.keys()
        return {name: p for name, p in self._parameters.items() if name not in copies and not is_adapter(name)}

    @property
    def has_frozen(self) -> bool:
        """Whether some parameters are not trained."""
        return not all(parameter.requires_grad for parameter in self._parameters.values())

    @cached_property
    def buffers(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all buffers that a checkpoint saves, by logical name."""
        return {
            f"{layer}.{inner}": tuple(buffer.shape)
            for layer, module in self.layers.items()
            for stored in [module.state_dict()]
            for inner, buffer in module.named_buffers()
            if inner in stored
        }

    @cached_property
    def fixed(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors that no optimizer changes, by logical name: frozen parameters and buffers."""
        return {
            f"{layer}.{inner}": tuple(tensor.shape)
            for layer, module in self.layers.items()
            for inner, tensor in chain(module.named_parameters(), module.named_buffers())
            if not tensor.requires_grad
        }

    @cached_property
    def originals(self) -> Mapping[str, str]:
        """Names of the originals of tied weights, by the names of their copies."""
        return self.model.originals

    @cached_property
    def _parameters(self) -> Mapping[str, Tensor]:
        """All parameters by logical name, under the names of copies too."""
        pairs = self.layers.items()
        return {f"{layer}.{inner}": p for layer, module in pairs for inner, p in module.named_parameters()}


def with_its_names(model: GPT | Llama) -> GPT | Llama:
    """Return a small model whose weights have the names of a model's, whose sizes may not fit each other.

    Args:
        model: The model, whose fields have their declared types and ranges.
    """
    small: dict[str, Any] = {"hidden": 2, "heads": 1, "seq": 2, "vocab": 2}
    small |= dict.fromkeys(("head_width", "window", "window_skips", "rope_scaling", "hf"), None)
    if isinstance(model, Llama):
        small |= dict.fromkeys(("kv_heads", "ffn", "pad_id", "attention_cap"), None)
    return replace(model, **small)
