"""Sizes next to those that do not fit, for a fault to propose."""

from __future__ import annotations


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
