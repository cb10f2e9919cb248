"""Whether the fields of a run hold what they are declared to hold: a dataclass itself does not look.

pydantic looks. What only draws a schedule does without, so it is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from raypar.schedules.schedule import Schedule

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_RANGES = {
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
}
_WORDS = _RANGES | {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "tuple_type": "a tuple (in TOML a list)",
    "dict_type": "a dictionary",
    "missing": "longer",
    "too_long": "of {max_length} at most",
    "callable_type": "a function",
    "literal_error": "{expected}",
    "dataclass_exact_type": "a {class_name}",
    "predicate_failed": "a grid of equal sides, as '2d:2x2', '2.5d:2x2x1' (the last is its depth) or '3d:2x2x2'",
}


class Fault(NamedTuple):
    """A field's fault: the field by its dotted path, a sentence, and whether the type is wrong, not the value only."""

    path: str
    text: str
    of_type: bool


def field_faults(part: Any, below: str = "") -> Iterator[Fault]:
    """Every field of a dataclass, and of those in it, that is not of its declared type or out of its range.

    Numbers are taken strictly: True is no number, 2.0 no whole number, and nan and inf no finite number.
    """
    from pydantic import ValidationError

    values = {field.name: getattr(part, field.name) for field in fields(part)}
    wrong: dict[Any, list[ErrorDetails]] = {}
    try:
        _strict(part.__class__)(**values)
    except ValidationError as error:
        wrong = {name: list(same) for name, same in groupby(error.errors(), key=lambda one: one["loc"][0])}
    for name, value in values.items():
        if name in wrong:
            yield from _told(wrong[name], f"{below}{name}")
        elif is_dataclass(value) and not isinstance(value, Schedule):  # its own check looks at every action
            yield from field_faults(value, f"{below}{name}.")


def brief(value: Any) -> str:
    """The value as Python writes it, cut where it gets long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@cache
def _strict(kind: type) -> type:
    """The dataclass as pydantic's: making one checks its fields; a field that is a dataclass has to be one already."""
    from pydantic import ConfigDict
    from pydantic.dataclasses import dataclass

    return dataclass(kind, config=ConfigDict(strict=True, allow_inf_nan=False), frozen=True)


def _told(errors: list[ErrorDetails], path: str) -> Iterator[Fault]:
    """One field's errors as sentences: what a union could be in one, unless a value out of range or a wrong item of a
    tuple says more."""

    def items(error: ErrorDetails) -> str:
        return "".join(f".{index}" for index in error["loc"] if isinstance(index, int))

    near = [error for error in errors if error["type"] in _RANGES] or errors
    deepest = [error for error in near if items(error)] or near
    for inner, same in groupby(deepest, key=items):
        group = list(same)
        words = [_WORDS.get(error["type"], error["msg"]).format(**error.get("ctx", {})) for error in group]
        of_type = any(error["type"] not in _RANGES for error in group)
        text = f"{path}{inner} is {brief(group[0]['input'])}: it must be {' or '.join(words)}"
        yield Fault(f"{path}{inner}", text, of_type)
