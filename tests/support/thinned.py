"""Grids of sizes of which ``make test`` takes some: ``make test-long`` takes the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest


def thinned(grid: Iterable[object], kept: Callable[..., object]) -> Sequence[object]:
    """Return values for ``pytest.mark.parametrize``: those that are not kept bear the mark ``long``.

    Args:
        grid: The values, or tuples of them.
        kept: Whether a value stays in ``make test``; it is called with the parts of a tuple.
    """
    parts = [value if isinstance(value, tuple) else (value,) for value in grid]
    return [pytest.param(*part, marks=() if kept(*part) else pytest.mark.long) for part in parts]
