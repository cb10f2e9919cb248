"""Figures from what was measured: speeds, ratios round by round, shares, differences. Nothing here measures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from tests.bench.contestants import Contestant
from tests.bench.workload import Size


def tokens_per_s(contestant: Contestant, size: Size, seconds: Sequence[float]) -> float:
    """The speed of a round, from the seconds a step of each process.

    Trainings that share nothing add up; of one training the slowest process counts.
    """
    if contestant.apart:
        return sum(size.tokens(contestant.layout) / each for each in seconds)
    return size.tokens("whole") / max(seconds)


def mean_losses(losses: Sequence[Sequence[float]]) -> list[float]:
    """The loss of every step: the mean over the processes that saw it."""
    seen = [of_process for of_process in losses if of_process]
    return [statistics.fmean(step) for step in zip(*seen, strict=True)]


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The median of the rounds' ratios; None where one of them has not all rounds."""
    if not ours or len(ours) != len(theirs):
        return None
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def worst_difference(losses: Sequence[float], reference: Sequence[float]) -> float | None:
    """The largest relative difference of a step's loss from the reference's, infinite if a loss is not finite; None
    where there is nothing to compare."""
    found = [abs(loss - wanted) / abs(wanted) for loss, wanted in zip(losses, reference, strict=False)]
    return (max(found) if all(map(math.isfinite, found)) else math.inf) if found else None
