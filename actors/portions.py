"""The division of a sequence into portions of limited size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def portions(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield items in portions, each of as many in a row as fit, and one at least.

    Args:
        items: The items.
        size_of: Returns the size of an item.
        limit: Largest size of a portion, unless one item alone is larger.
    """
    portion, size = list[T](), 0
    for item in items:
        if portion and size + size_of(item) > limit:
            yield portion
            portion, size = [], 0
        portion.append(item)
        size += size_of(item)
    if portion:
        yield portion
