"""What can be wrong with a model, beyond each field by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
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


def model_faults(model: GPT | Llama | Layers, right: Callable[..., bool]) -> Iterator[str]:
    """Sizes that don't fit each other, with the nearest ones that do; ``right`` tells whether fields are sound."""
    if isinstance(model, Transformer) and right("model.hidden", "model.heads"):
        if model.hidden % model.heads:
            near = _divisor_near(model.heads, model.hidden)
            yield f"model.hidden {model.hidden} is not a multiple of model.heads {model.heads}: use {near} heads, say"
        elif right("model.positions") and model.positions == "rope" and model.hidden // model.heads % 2:
            width, fix = model.hidden // model.heads, "set model.hidden to a multiple of 2 * heads, or other positions"
            yield f"model.positions is 'rope', which turns pairs, but a head has the odd width {width}: {fix}"
    if isinstance(model, Llama) and right("model.heads", "model.kv_heads") and model.heads % model.num_kv_heads:
        near = _divisor_near(model.num_kv_heads, model.heads)
        yield f"model.kv_heads {model.kv_heads} does not divide model.heads {model.heads}: use {near}, say"


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


def _divisor_near(wanted: int, whole: int) -> int:
    """The divisor of ``whole`` that is nearest to ``wanted``; of two the smaller."""
    wanted = min(wanted, whole)
    near = (number for gap in count() for number in (wanted - gap, wanted + gap))
    return next(number for number in near if number > 0 and whole % number == 0)
