"""Build the model that a spec describes."""

from __future__ import annotations

from raypar.actors.models.base import Model
from raypar.actors.models.gpt import GPTModel
from raypar.actors.models.llama import LlamaModel
from raypar.actors.models.user_layers import LayersModel
from raypar.actors.specs.model import GPT, Layers, Llama


def build_model(spec: GPT | Llama | Layers, seed: int) -> Model:
    """Build a model without weights.

    Args:
        spec: Description of the model.
        seed: The run's seed, for a user's function that draws random numbers while it builds the layers.
    """
    if isinstance(spec, Layers):
        return LayersModel(spec, seed)
    return GPTModel(spec) if isinstance(spec, GPT) else LlamaModel(spec)
