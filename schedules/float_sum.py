"""The sum of floats, with the same bits on every Python."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add


def float_sum(values: Iterable[float]) -> float:
    """Add numbers from the first to the last, each result rounded.

    The built-in ``sum`` does so up to Python 3.11. Since 3.12 it compensates rounding errors, so that the last bits of
    its result depend on the version of Python.

    Args:
        values: The numbers.

    Returns:
        Their sum; 0 if there are none.
    """
    return reduce(add, values, 0)
