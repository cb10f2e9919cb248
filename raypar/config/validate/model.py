"""What can be wrong between a model and the rest of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import GPT, Layers, Llama, Transformer


def heads_near(heads: int, ways: int, hidden: int) -> str:
    """The multiples of ``ways`` next to a number of heads, each with the hidden size next to ``hidden`` that it
    divides."""
    below = heads // ways * ways
    return " or ".join(_of(near, hidden) for near in (below, below + ways) if near)


def multiples_near(size: int, ways: int) -> str:
    """The multiples of ``ways`` next to a size."""
    below = size // ways * ways
    return " or ".join(str(fit) for fit in (below, below + ways) if fit)


def _of(heads: int, hidden: int) -> str:
    nearest = max(1, round(hidden / heads)) * heads
    return f"{heads} heads" if nearest == hidden else f"{heads} heads with model.hidden {nearest}"


def length_faults(model: GPT | Llama | Layers, data: Batches) -> Iterator[str]:
    """Sequences of the user's own batches that are longer than the model's: the first batch is looked at."""
    if not isinstance(model, Transformer):
        return
    for name, fn in (("data.fn", data.fn), ("data.validate", data.validate)):
        try:
            inputs: Any = fn(0, 0, 0)[0] if fn is not None else ()
            lengths = [value.shape[1] for value in (inputs if isinstance(inputs, tuple) else (inputs,))]
        except Exception:  # the actors tell, with its trace; here its files may be missing
            continue
        if (longest := max(lengths, default=0)) > model.seq:
            yield f"{name} returns sequences of {longest} tokens, but model.seq is {model.seq}: set it to {longest}"
