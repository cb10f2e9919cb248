"""Check a model against the data, and suggest sizes that fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raypar.actors.context_parallel.sequence import num_pieces
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run
from raypar.config.rules import Examined


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


def divisors_near(number: int, whole: int) -> str:
    """Name the divisors of ``whole`` just below and above a number, such as "2 or 4"."""
    below = next(fit for fit in range(min(number, whole), 0, -1) if whole % fit == 0)
    above = next((fit for fit in range(number + 1, whole + 1) if whole % fit == 0), below)
    return " or ".join(str(fit) for fit in sorted({below, above}))


def _of(heads: int, hidden: int) -> str:
    nearest = max(1, round(hidden / heads)) * heads
    return f"{heads} heads" if nearest == hidden else f"{heads} heads with model.hidden {nearest}"


def length_faults(examined: Examined, data: Batches) -> Iterator[str]:
    """Yield a fault if the first batch of the user's functions has no whole ids, or sequences that do not fit the run.

    They may have ``seq`` tokens at the most, and a number that actors or slices divide.

    Args:
        examined: The run.
        data: Its functions.
    """
    run = examined.run
    model = run.model
    if not isinstance(model, Transformer):
        return
    divisors = dict(_divisors(run))
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
            what = f"{name} returns sequences of {longest} tokens"
            yield f"{what}, but model.seq is {model.seq}: set model.seq to {longest}"
        for why, count in divisors.items():
            if (odd := next((length for length in lengths if length % count), None)) is not None:
                yield f"{name} returns sequences of {odd} tokens, but {why}: give {multiples_near(odd, count)} tokens"


def _divisors(run: Run) -> Iterator[tuple[str, int]]:
    """Yield the numbers that must divide the length of a sequence, each after the reason."""
    if run.token_slices > 1:
        yield f"token_slices is {run.token_slices}", run.token_slices
    if run.mesh.cp == 1:
        return
    pieces = num_pieces(run.context, run.mesh.cp)
    yield f"mesh.cp {run.mesh.cp} with context {run.context!r} cuts them into {pieces} pieces", pieces
