"""Constructors that suggest the nearest field for an unknown one, as the command line does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from raypar.actors.plain_value import plain_value
from raypar.schedules.nearest_name import nearest

T = TypeVar("T")

COMMON_NAMES = {  # names of fields in other programs, and here
    "learning_rate": "lr",
    "batch_size": "micro_batch_size",
    "num_layers": "layers",
    "n_layer": "layers",
    "n_head": "heads",
    "num_heads": "heads",
    "hidden_size": "hidden",
    "d_model": "hidden",
    "max_seq_len": "seq",
    "context_length": "seq",
}

_FIELDS: dict[str, tuple[str, ...]] = {}  # by the name of a class, its fields
_INSTEAD: dict[str, Mapping[str, str]] = {}  # by the name of a class, its replacements of other classes' fields


def is_none(value: object) -> bool:
    """Return whether a value is a text that means None, as on a command line or in a file."""
    return isinstance(value, str) and value in ("none", "None")


def known_fields(**instead: str) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass, so that an unknown field raises a TypeError that suggests the nearest one.

    Numbers of other libraries, such as numpy's, are converted to Python's, and paths to texts; "none" and "None" become
    None if a field may be None. The dataclass keeps its signature, pickling and ``dataclasses.replace``.

    Args:
        **instead: By a field that the class does not have, the text of its replacement.
    """

    def decorated(cls: type[T]) -> type[T]:
        """Replace the constructor of a class by one that checks the names of the fields first."""
        make: Callable[..., None] = cls.__init__
        _FIELDS[cls.__name__] = tuple(field.name for field in fields(cls))  # type: ignore[arg-type]
        _INSTEAD[cls.__name__] = instead
        optional = {field.name for field in fields(cls) if "None" in str(field.type).split(" | ")}  # type: ignore[arg-type]

        @wraps(make)
        def checked(self: T, *args: Any, **given: Any) -> None:
            if faults := [*unknown_faults(cls.__name__, given)]:
                raise TypeError("\n".join(faults))
            for name, value in given.items():
                given[name] = None if name in optional and is_none(value) else plain_value(value)
            make(self, *map(plain_value, args), **given)

        cls.__init__ = checked  # type: ignore[method-assign, assignment]
        return cls

    return decorated


def unknown_faults(name: str, given: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each given field that a class does not have, with the nearest one.

    Args:
        name: The name of a class that ``known_fields`` has decorated.
        given: Names of fields.
    """
    names, instead = _FIELDS[name], _INSTEAD[name]
    for field in given:
        if field in names:
            continue
        others = [other for other, theirs in _FIELDS.items() if field in theirs]
        common = COMMON_NAMES.get(field)
        close = common if common in names else nearest(field, names)
        if field in instead:
            guess = f"it has {instead[field]}"
        elif others and common not in names and (close is None or close.strip("s") != field.strip("s")):
            guess = f"{' and '.join(others)} {'has' if len(others) == 1 else 'have'} one"
        elif close:
            guess = f"did you mean {close}?"
        else:
            guess = f"its fields are {', '.join(names)}"
        yield f"{name} has no field {field!r}: {guess}"
