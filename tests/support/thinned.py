"""Products of parameters of which ``make test`` takes some cases: ``make test-long`` takes the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from zlib import crc32

import pytest

_STRIDE = 8  # of the cases of a test with the mark "sampled"
_SIZES = {"each_value": 1, "each_pair": 2}


def thinned(grid: Iterable[object], kept: Callable[..., object]) -> Sequence[object]:
    """Return values for ``pytest.mark.parametrize``: those that are not kept bear the mark ``long``.

    Args:
        grid: The values, or tuples of them.
        kept: Whether a value stays in ``make test``; it is called with the parts of a tuple.
    """
    return [_param(value, is_short=bool(kept(*_parts(value)))) for value in grid]


def _param(value: object, *, is_short: bool) -> object:
    return pytest.param(*_parts(value), marks=() if is_short else pytest.mark.long)


def _parts(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def mark_long(items: Iterable[pytest.Item]) -> None:
    """Mark as long some cases of tests with the mark ``each_value``, ``each_pair`` or ``sampled``.

    With ``each_value`` every value of every parameter is in a case that stays, with ``each_pair`` all values of every
    two parameters are together in one, as far as there is such a case. With ``sampled`` one of eight stays; which one,
    differs from test to test, so that tests of the same cases take different ones. Of a test with two marks a case of
    eight that the other leaves stays.
    """
    for mark in (*_SIZES, "sampled"):
        tests: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker(mark) is not None and item.get_closest_marker("long") is None:
                tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for name, cases in tests.items():
            if mark == "sampled":
                first = crc32(name.encode()) % min(_STRIDE, len(cases))
                chosen = set(range(first, len(cases), _STRIDE))
            else:
                chosen = _cover([_values(case, _SIZES[mark]) for case in cases])
            for number, case in enumerate(cases):
                if number not in chosen:
                    case.add_marker(pytest.mark.long)


def _values(case: pytest.Item, size: int) -> set[tuple[str, ...]]:
    """Return what a case covers: its parameters' values, each or by twos."""
    each = sorted(f"{name}={value!r}" for name, value in case.callspec.params.items())
    return set(combinations(each, min(size, len(each))))


def _cover(cases: Sequence[set[tuple[str, ...]]]) -> set[int]:
    """Return the numbers of cases that cover what all do, the first of those that add most at a time."""
    chosen: set[int] = set()
    left = set().union(*cases)
    while left:
        number = max(range(len(cases)), key=lambda one: len(cases[one] & left))
        chosen.add(number)
        left -= cases[number]
    return chosen
