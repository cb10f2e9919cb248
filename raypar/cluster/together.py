"""Blocking requests to Ray, several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_AT_ONCE = 16  # threads: more would wait for one another in this process


def together(call: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call a function for each item, several at a time, and return the results in the order of the items.

    Raises:
        Exception: The first exception of a call, in that order.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(call, items))
