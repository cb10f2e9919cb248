"""Numbers and paths of other libraries, such as numpy's, as Python's own: only those are written as JSON and TOML."""

from __future__ import annotations

from decimal import Decimal
from numbers import Rational
from operator import index
from os import PathLike, fspath


def plain_value(value: object) -> object:
    """Return a number of another library as Python's own and a path as its text, also in a tuple; others as they are.

    A fraction is a whole number if it can be one, else a float.
    """
    if type(value) is tuple:
        return tuple(plain_value(item) for item in value)
    if isinstance(value, (int, float, str)):
        return value
    try:
        if isinstance(value, PathLike):
            return path if isinstance(path := fspath(value), str) else value
        if isinstance(value, Rational):
            return index(value.numerator) if value.denominator == 1 else float(value)
        return float(value) if isinstance(value, Decimal) else _plain_scalar(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return value


def _plain_scalar(value: object) -> object:
    """Return an array or tensor without dimensions as a number of Python's."""
    if getattr(value, "ndim", None) != 0:
        return value
    if str(getattr(value, "dtype", "")).endswith("bool"):
        return bool(value)
    if hasattr(value, "__index__") and "float" not in str(getattr(value, "dtype", "")):
        return index(value)
    return float(value) if hasattr(value, "__float__") else value
