"""Activation recomputation: which activations a backward computes again, for each layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Word = Literal["none", "selective", "full"]
Recompute = Word | tuple[Word, ...]


def word_of(recompute: Recompute, body: range, layer: int) -> Word:
    """Return how to recompute one layer.

    Args:
        recompute: One word for all layers, or a tuple with a word for each layer of the body.
        body: Indices of the body's layers in the model. With a tuple, all other layers have "none".
        layer: Index of the layer in the model.
    """
    if isinstance(recompute, str):
        return recompute
    return recompute[layer - body.start] if layer in body else "none"


def recompute_faults(recompute: Recompute, num_layers: int) -> Iterator[str]:
    """Yield the faults of a run's ``recompute``.

    Args:
        recompute: The field's value.
        num_layers: Number of layers in the model's body.
    """
    words = (recompute,) if isinstance(recompute, str) else recompute
    if not isinstance(recompute, str) and len(words) != num_layers:
        fix = f"set recompute to {words[0] if words else 'full'!r}, say, or give one for each layer"
        yield f"recompute has {len(words)} words, the model {num_layers} layers: {fix}"
