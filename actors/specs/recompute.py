"""What a backward computes again instead of having kept it, layer by layer, and what can be wrong with that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Word = Literal["none", "selective", "full"]
Recompute = Word | tuple[Word, ...]


def word_of(recompute: Recompute, body: range, layer: int) -> Word:
    """The word for a layer of the model; a tuple has those of its body, the others are then kept."""
    if isinstance(recompute, str):
        return recompute
    return recompute[layer - body.start] if layer in body else "none"


def recompute_faults(recompute: Recompute, num_layers: int, *, has_core: bool) -> Iterator[str]:
    """Everything that is wrong with it for so many layers in a model's body, with or without attention cores."""
    words = (recompute,) if isinstance(recompute, str) else recompute
    if not isinstance(recompute, str) and len(words) != num_layers:
        yield f"recompute has {len(words)} words, the model {num_layers} layers: give one word, or one for each layer"
    if "selective" in words and not has_core:
        yield "recompute is 'selective', but of your own layers it is not known what attends: use 'full' or 'none'"
