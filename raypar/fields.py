"""Whether the fields of a run hold what they are declared to hold: a dataclass itself does not look."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from raypar.schedules.schedule import Schedule

_WORDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text", type(None): "None"}
_MANY = {int: "whole numbers", float: "finite numbers", str: "texts"}


def type_faults(value: Any, hint: Any, path: str = "") -> Iterator[str]:
    """Every field below ``value`` that is not of its declared type, by dotted path, with what it must be.

    Numbers are taken strictly: True is no number, 2.0 no whole number, and nan and inf no finite number.
    """
    options = _options(hint)
    if dataclasses.is_dataclass(value) and any(isinstance(value, kind) for kind in options if isinstance(kind, type)):
        if isinstance(value, Schedule):
            return  # its own check looks at every action
        hints = get_type_hints(type(value))
        for field in dataclasses.fields(value):
            inner = f"{path}.{field.name}" if path else field.name
            yield from type_faults(getattr(value, field.name), hints[field.name], inner)
    elif not any(_fits(value, option) for option in options):
        yield f"{path} is {brief(value)}: it must be {' or '.join(map(_words, options))}"


def allows_none(hint: Any) -> bool:
    """Whether None is one of the values of a type."""
    return type(None) in _options(hint)


def brief(value: Any) -> str:
    """The value as Python writes it, cut where it gets long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in args)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = args[:1] * len(value) if args[1:] == (...,) else args
        return len(kinds) == len(value) and all(map(_fits, value, kinds))
    if origin is Callable:
        return callable(value)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    if hint in _WORDS:
        return type(value) is hint
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple:
        return f"a tuple (in TOML a list) of {'' if args[1:] == (...,) else f'{len(args)} '}{_MANY[args[0]]}"
    if origin is Callable:
        return "a function"
    return _WORDS.get(hint) or f"a {hint.__name__}"
