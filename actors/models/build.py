"""From a model's description to the model."""

from __future__ import annotations

from raypar.actors.models.base import Model
from raypar.actors.models.gpt import GPTModel
from raypar.actors.models.llama import LlamaModel
from raypar.actors.models.user_layers import LayersModel
from raypar.actors.specs.model import GPT, Layers, Llama


def build_model(spec: GPT | Llama | Layers, seed: int) -> Model:
    """The model, without weights; ``seed`` is for user functions that draw while they build."""
    if isinstance(spec, Layers):
        return LayersModel(spec, seed)
    return GPTModel(spec) if isinstance(spec, GPT) else LlamaModel(spec)
