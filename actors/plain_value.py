"""Conversion of other libraries' numbers and paths to Python's types, which JSON and TOML can have."""

from __future__ import annotations

import os
from decimal import Decimal
from numbers import Rational
from operator import index


def plain_value(value: object) -> object:
    """Return a number as Python's type and a path as text, also in a tuple or a dict; any other value unchanged.

    A fraction becomes an int if it is a whole number, else a float.
    """
    if type(value) is tuple:
        return tuple(plain_value(item) for item in value)
    if type(value) is dict:
        return {name: plain_value(item) for name, item in value.items()}
    if isinstance(value, (int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    try:
        if isinstance(value, Rational) and value.denominator == 1:
            return index(value.numerator)
        if not isinstance(value, (Decimal, Rational)) and getattr(value, "ndim", None) != 0:
            return value
        if str(getattr(value, "dtype", "")).endswith("bool"):
            return bool(value)
        if hasattr(value, "__index__") and "float" not in str(getattr(value, "dtype", "")):
            return index(value)
        return float(value) if hasattr(value, "__float__") else value
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return value
