"""Build the model that a spec describes, and find the first stage that needs gradients."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.actors.layers.fp8 import Fp8Linear
from raypar.actors.models.base import Model
from raypar.actors.models.init.unregistered import borrowed
from raypar.actors.models.own.user_layers import LayersModel
from raypar.actors.models.transformer import TransformerModel
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.actors.specs.precision import Compute


def build_model(spec: GPT | Llama | Layers, seed: int, compute: Compute = "fp32") -> Model:
    """Build a model without weights.

    Args:
        spec: Description of the model.
        seed: The run's seed, for a user's function that draws random numbers while it builds the layers.
        compute: What the layers will compute in. In fp8 the linear layers of blocks are others.
    """
    if isinstance(spec, Layers):
        return LayersModel(spec, seed)
    return TransformerModel(spec, Fp8Linear if compute == "fp8" else None)


def first_learning(model: Model, parts: Sequence[Sequence[int]]) -> int:
    """Return the number of the first stage that has a trainable parameter; the last stage if none has.

    It is 0 if a layer uses tensors of another one without registering them, for these may be trainable.

    Args:
        model: The model.
        parts: The layers of each stage.
    """
    learns = [any(p.requires_grad for layer in part for p in model.skeleton[layer].parameters()) for part in parts]
    first = next((stage for stage, does in enumerate(learns) if does), len(parts) - 1)
    return 0 if first and borrowed(model.skeleton) else first
