"""Words of a command line as a user writes them, in the form that the parser reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args, get_type_hints

from raypar.actors.specs.model import GPT, Layers, Llama, Transformer
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.run import Run


def read_precision(words: Sequence[str]) -> list[str]:
    """Replace ``--precision bf16`` by ``--precision.compute bf16``."""
    return [
        word.replace("--precision", "--precision.compute", 1) if word.partition("=")[0] == "--precision" else word
        for word in words
    ]


def with_experts(model: GPT | Llama | Layers, words: Sequence[str]) -> GPT | Llama | Layers:
    """Return the model that the flags of experts change: with experts if a flag sets one of their fields.

    Args:
        model: The model that flags change.
        words: The words of a command line.
    """
    sets = any(word.startswith("--model.moe.") for word in words)
    return replace(model, moe=MoE()) if isinstance(model, Transformer) and model.moe is None and sets else model


def read_none(words: Sequence[str]) -> list[str]:
    """Replace ``none``, as TOML files write it, by tyro's ``None`` for flags whose field may be None."""
    hints = ((name, get_args(hint)) for name, hint in get_type_hints(Run).items())
    optional = {f"--{name}" for name, kinds in hints if type(None) in kinds and str not in kinds}

    def may_be_none(flag: str) -> bool:
        return flag[:2] + flag[2:].replace("-", "_") in optional

    read = []
    for before, word in zip(["", *words], words, strict=False):
        flag, _, value = word.partition("=")
        if word == "none" and may_be_none(before):
            read.append("None")
        else:
            read.append(f"{flag}=None" if value == "none" and may_be_none(flag) else word)
    return read
