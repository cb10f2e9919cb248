"""Read the flags that give a model experts or take them away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raypar.actors.specs.model import GPT, Layers, Llama, Transformer
from raypar.actors.specs.moe import MoE


def read_experts(model: GPT | Llama | Layers, words: Sequence[str]) -> tuple[GPT | Llama | Layers, list[str]]:
    """Read whether a model has experts: ``--model.moe none`` takes them away, a flag of their fields gives it some.

    Args:
        model: The model that flags change.
        words: The words of a command line.

    Returns:
        The model with experts or without, and the words that are left for the parser.
    """
    left = list(words)
    for at in range(len(left) - 1, -1, -1):
        given = left[at : at + 2]
        if given[0].lower() == "--model.moe=none" or [*map(str.lower, given)] == ["--model.moe", "none"]:
            del left[at : at + (1 if "=" in given[0] else 2)]
    if not isinstance(model, Transformer):
        return model, left
    moe = None if len(left) < len(words) else model.moe
    if moe is None and any(word.startswith("--model.moe.") for word in left):
        moe = MoE()
    return replace(model, moe=moe), left
