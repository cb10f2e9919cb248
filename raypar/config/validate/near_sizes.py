"""Phrases for messages: sizes near a wrong one that a number divides, or that divide a number."""

from __future__ import annotations


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
