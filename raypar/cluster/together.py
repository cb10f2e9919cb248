"""Requests to Ray that wait for its answer, several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_AT_ONCE = 16  # threads: more would wait for one another in this process


def together(call: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call a function for each of some items, several of them at a time, and return the results in their order.

    Raises:
        Exception: What a call has raised, the first in order.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(call, items))
