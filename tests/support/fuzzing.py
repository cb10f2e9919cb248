"""The command of a fuzzer: draw runs, count what they are examples of, and tell the first one that differs."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy


def fuzz(
    about: str | None,
    drawn: SearchStrategy[Any],
    compare: Callable[[Any], Iterable[str]],
    number: int,
    phases: Collection[Phase] = tuple(Phase),
) -> int:
    """Read ``--number`` and ``--seed``, compare as many draws, and print how many there were of each kind.

    Args:
        about: What ``--help`` says.
        drawn: What is drawn.
        compare: Called with each draw; returns what it is an example of, and raises AssertionError if it differs.
        number: Number of draws unless told.
        phases: Hypothesis' phases; without Phase.shrink the first draw that differs is told, not the smallest.

    Returns:
        The exit code: 1 if a draw differs.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=number)
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    counts: Counter[str] = Counter()
    start = time.perf_counter()

    @seed(told.seed)
    @settings(
        max_examples=told.number,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn)
    def every(one):
        counts.update(compare(one))

    try:
        every()
    except AssertionError as error:
        print(error, *error.__notes__, sep="\n")
        return 1
    finally:
        print(", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))
        print(f"{time.perf_counter() - start:.0f} s")
    return 0
