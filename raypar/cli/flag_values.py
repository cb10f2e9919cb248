"""Values of flags that are no value of their field, such as ``--steps ten``: all of them are told at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_NUMBERS = {int: "a whole number", float: "a number"}


def value_faults(kind: type, words: Sequence[str], default: object) -> Iterator[str]:
    """Yield a fault for each flag of a number or of a few words whose value is none of these.

    Args:
        kind: The class whose fields the flags are.
        words: The words of a command line.
        default: Its values before the flags; they tell which classes nested fields have.
    """
    for word, after in zip(words, [*words, ""][1:], strict=True):
        flag, equals, value = word.partition("=")
        value = value if equals else after
        hint = _hint_of(kind, flag, default) if flag.startswith("--") else None
        if hint is not None and value and not (value.startswith("--") and not equals):
            kinds = _members(hint)
            if not any(_fits(value, one) for one in kinds):
                choices = [_NUMBERS[one] if one in _NUMBERS else str(one) for one in kinds if one is not NoneType]
                yield f"{flag} is {value!r}: it must be {' or '.join(choices)}"


def _hint_of(kind: type, flag: str, default: object) -> Any:
    """Return the type of a flag's field; None if there is no such field."""
    *above, name = flag.removeprefix("--").replace("-", "_").split(".")
    for part in above:
        default = getattr(default, part, None)
        kind = type(default)
    try:
        return get_type_hints(kind).get(name)
    except TypeError:  # of what has no fields
        return None


def _members(hint: Any) -> list[Any]:
    """Return the members of a union, and of a Literal in it the words."""
    if get_origin(hint) in (Union, UnionType):
        return [member for one in get_args(hint) for member in _members(one)]
    return list(get_args(hint)) if get_origin(hint) is Literal else [hint]


def _fits(value: str, kind: Any) -> bool:
    """Return whether a word may be a value of a type; the parser looks at types that are not known here."""
    if kind is NoneType:
        return value.lower() == "none"
    if kind not in _NUMBERS:
        return isinstance(kind, type) or get_origin(kind) is not None or value == str(kind)
    try:
        kind(value)
    except ValueError:
        return False
    return True
