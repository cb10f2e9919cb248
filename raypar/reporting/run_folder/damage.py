"""What is wrong with a file of a run folder, and its JSON read by a schema."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from raypar.config.fields import short_repr

T = TypeVar("T")
MOST_FAULTS = 10  # largest number of faults that are reported of one file


class DamagedError(Exception):
    """The faults of one file.

    Attributes:
        faults: The faults.
        sound: What can be used of the file nevertheless; None if nothing can.
    """

    def __init__(self, *faults: str, sound: Any = None) -> None:
        self.faults, self.sound = faults, sound


def json_of(raw: bytes, kind: Callable[..., T]) -> T:
    """Parse JSON of a given type. NaN and infinity are allowed, because a loss may be either.

    Raises:
        DamagedError: It is not of this type.
    """
    try:
        found: T = reader_of(kind).validate_json(raw, strict=True)
    except ValidationError as error:
        errors = [(".".join(map(str, one["loc"])), one) for one in error.errors(include_url=False)[:MOST_FAULTS]]
        raise DamagedError(
            *(f"has {at or 'a text'}: {short_repr(one['input'])}: {one['msg']}" for at, one in errors)
        ) from error
    return found


@cache
def reader_of(kind: Any) -> TypeAdapter[Any]:
    """Return what reads values of a type; it is made once."""
    return TypeAdapter(kind)
