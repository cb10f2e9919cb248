"""The division of a sequence into portions of limited size."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def portions(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield items in portions, each of as many in a row as fit, and one at least.

    Args:
        items: The items.
        size_of: Returns the size of an item.
        limit: Largest size of a portion, unless one item alone is larger.
    """
    return (portion for _, portion in portions_by_kind(items, lambda _: None, size_of, limit))


def portions_by_kind(
    items: Iterable[T], kind_of: Callable[[T], K], size_of: Callable[[T], int], limit: int
) -> Iterator[tuple[K, list[T]]]:
    """Yield items in portions of one kind, each of as many in a row of that kind as fit, and one at least.

    Args:
        items: The items.
        kind_of: Returns the kind of an item.
        size_of: Returns the size of an item.
        limit: Largest size of a portion, unless one item alone is larger.

    Returns:
        (kind, portion) in the order in which the portions were filled; those that are not full come last.
    """
    filling, sizes = dict[K, list[T]](), dict[K, int]()
    for item in items:
        kind, size = kind_of(item), size_of(item)
        if kind in filling and sizes[kind] + size > limit:
            yield kind, filling.pop(kind)
        if kind not in filling:
            filling[kind], sizes[kind] = [], 0
        filling[kind].append(item)
        sizes[kind] += size
    yield from filling.items()
