"""Numbers of other libraries, such as numpy's, as Python's own: only those can be written as JSON and TOML."""

from __future__ import annotations

from operator import index


def plain_number(value: object) -> object:
    """Return a number of another library as Python's own, also in a tuple; anything else as it is."""
    if type(value) is tuple:
        return tuple(plain_number(item) for item in value)
    if isinstance(value, (int, float, str)) or getattr(value, "ndim", None) != 0:
        return value
    try:
        if str(getattr(value, "dtype", "")).endswith("bool"):
            return bool(value)
        if hasattr(value, "__index__") and "float" not in str(getattr(value, "dtype", "")):
            return index(value)
        return float(value) if hasattr(value, "__float__") else value
    except (TypeError, ValueError, RuntimeError):
        return value
