"""The loss on validation data, of some steps without an update."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from raypar.actors.specs.run import Run
from raypar.reporting.perplexity import is_cross_entropy
from raypar.reporting.report import Evaluation, losses_of, mean_loss


def evaluated(run: Run, step: int, count: int, take: Callable[[int], list[Any]]) -> Evaluation:
    """Evaluate a run.

    Args:
        run: The run.
        step: Number of training steps taken.
        count: Number of evaluation steps.
        take: Takes the step of a number, from 0, and returns what each actor tells of it.
    """
    start, losses, counts = time.perf_counter(), list[float](), list[int]()
    for number in range(count):
        found = losses_of(take(number))
        losses += found[0]
        counts += found[1]
    loss, seconds = mean_loss(losses, counts), time.perf_counter() - start
    return Evaluation(step, loss, sum(counts), seconds, is_cross_entropy(run))
