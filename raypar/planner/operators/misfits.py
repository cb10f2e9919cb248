"""Why no division satisfies the user's annotations, with the fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raypar.planner.operators.operator import Chain, Operator


def annotation_faults(chain: Chain, ranks: int) -> Iterator[str]:
    """Yield the modules of a chain whose annotation splits along a dim that they lack or that has no equal parts.

    Args:
        chain: The operators.
        ranks: Number of tensor-parallel ranks.
    """
    for one in chain:
        yield from _placement_faults(one, "from", one.given, one.taken, ranks)
        yield from _placement_faults(one, "to", one.goes, one.made, ranks)
        if not one.strategy.startswith("split") or not one.taken:
            continue
        dim = int(one.strategy.removeprefix("split"))
        dims = len(one.taken) - (one.kind != "embedding")  # ids have no features
        if dim >= dims:
            fix = " or ".join(f"'split{other}'" for other in range(dims)) or "'replicated'"
            what = f"but of its input, {'x'.join(map(str, one.taken))}, that dim is none of samples or tokens"
            yield f"model.plan: {one.name} is {one.strategy!r}, {what}: use {fix}"
        elif one.taken[dim] % ranks:
            yield _unequal(one, f"{one.taken[dim]} along dim {dim} of the input", one.taken[dim], ranks)


def _placement_faults(one: Operator, word: str, placement: str, shape: Sequence[int], ranks: int) -> Iterator[str]:
    """Yield a fault if a tensor is annotated to be split along a dim that it lacks, or that has no equal parts."""
    if not placement.startswith("S"):
        return
    dim, sizes = int(placement.removeprefix("S")), "x".join(map(str, shape))
    if not -1 <= dim < len(shape):
        fix = ", ".join(f"S{other}" for other in range(len(shape)))
        text = f"model.plan: {one.name} is given as '{word} {placement}', but of {sizes} there is no dim {dim}"
        yield f"{text}: use R, S-1 or {fix}"
    elif shape[dim] % ranks:
        what = "input" if word == "from" else "output"
        yield _unequal(one, f"{shape[dim]} along dim {dim} of the {what}", shape[dim], ranks)


def way_fault(chain: Chain, name: str, ranks: int) -> str:
    """Say why no division leads to an operator.

    Args:
        chain: The operators.
        name: Name of the first one that can't be reached.
        ranks: Number of tensor-parallel ranks.
    """
    end = next(position for position, one in enumerate(chain) if one.name == name)
    asked = [one for one in chain[: end + 1] if one.strategy][-1]
    outputs, inputs = asked.made[-1], asked.taken[-1]
    if asked.strategy == "column" and outputs % ranks:
        return _unequal(asked, f"{outputs} outputs", outputs, ranks)
    if asked.strategy == "row" and inputs % ranks:
        return _unequal(asked, f"{inputs} inputs", inputs, ranks)
    reached = "" if asked.name == name else f", and from there to {name}"
    fix = f"leave out ' from' and ' to' of it and of its neighbours, or give sizes that mesh.tp {ranks} divides"
    return f"model.plan: no division leads to what it says of {asked.name}{reached}: {fix}"


def _unequal(one: Operator, what: str, size: int, ranks: int) -> str:
    low = size // ranks * ranks
    sizes = f"{low} or {low + ranks}" if low else str(ranks)
    fix = f"use {sizes}, or leave it out of the plan"
    return f"mesh.tp {ranks} does not divide the {what} of {one.name}, which the plan divides: {fix}"
