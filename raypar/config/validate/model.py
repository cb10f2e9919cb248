"""Check a model against the data, and suggest sizes that fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import GPT, Layers, Llama, Transformer


def heads_near(heads: int, ways: int, hidden: int) -> str:
    """Name the multiples of ``ways`` closest to a number of heads, each with a hidden size that it divides.

    Args:
        heads: Number of attention heads.
        ways: The number that must divide the heads.
        hidden: The model's hidden size. The suggested hidden sizes are the closest to it.

    Returns:
        A phrase for a message, such as "6 heads with model.hidden 30 or 9 heads with model.hidden 36".
    """
    below = heads // ways * ways
    return " or ".join(_of(near, hidden) for near in (below, below + ways) if near)


def multiples_near(size: int, ways: int) -> str:
    """Name the multiples of ``ways`` just below and above a size, such as "6 or 9"."""
    below = size // ways * ways
    return " or ".join(str(fit) for fit in (below, below + ways) if fit)


def _of(heads: int, hidden: int) -> str:
    nearest = max(1, round(hidden / heads)) * heads
    return f"{heads} heads" if nearest == hidden else f"{heads} heads with model.hidden {nearest}"


def length_faults(model: GPT | Llama | Layers, data: Batches) -> Iterator[str]:
    """Yield a fault if the first batch of the user's functions has sequences longer than ``seq``, or no whole ids."""
    if not isinstance(model, Transformer):
        return
    for name, fn in (("data.fn", data.fn), ("data.validate", data.validate)):
        try:
            inputs: Any = fn(0, 0, 0)[0] if fn is not None else ()
            ids = inputs if isinstance(inputs, tuple) else (inputs,)
            lengths = [value.shape[1] for value in ids]
            broken = next((value.dtype for value in ids if value.is_floating_point()), None)
        except Exception:  # here its files may be missing; an actor reports the error with its traceback
            continue
        if broken is not None:
            yield f"{name} returns {str(broken).removeprefix('torch.')} as token ids: make them int64, with .long()"
        if (longest := max(lengths, default=0)) > model.seq:
            yield f"{name} returns sequences of {longest} tokens, but model.seq is {model.seq}: set it to {longest}"
