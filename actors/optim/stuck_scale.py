"""Detection of a dynamic loss scale that is stuck, with remedies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

WINDOWS = 3  # growth windows without growth after which a loss scale is stuck

REMEDIES = (
    "lower the learning rate, make the warm-up longer, choose another window for the scale, or a larger eps of the "
    "optimizer"
)


def stuck_scale(history: Sequence[tuple[float, bool]], floor: float, window: int) -> str | None:
    """Return why a loss scale is stuck, and the remedies.

    With a healthy scale about one step in every window overflows, because the scale grows until one does. It is stuck
    if it stayed at its floor for the last ``WINDOWS`` windows, or if each of them had an overflow and it never grew.

    Args:
        history: The scale of each step and whether the step was skipped for an overflow, the latest last.
        floor: The smallest scale.
        window: Number of steps without an overflow after which the scale grows.

    Returns:
        The reason with the remedies; None if the scale is not stuck, or if the history is shorter than that.
    """
    steps = WINDOWS * window
    latest = history[-steps:]
    if len(latest) < steps:
        return None
    scales = [scale for scale, _ in latest]
    if all(scale <= floor for scale in scales):
        return f"the loss scale is at its floor, {floor:g}, for {steps:,} steps: {REMEDIES}"
    skipped = [any(skip for _, skip in latest[start : start + window]) for start in range(0, steps, window)]
    if all(skipped) and not any(after > before for before, after in pairwise(scales)):
        count = sum(skip for _, skip in latest)
        return (
            f"each of the last {WINDOWS} windows of {window:,} steps overflowed ({count:,} steps skipped): {REMEDIES}"
        )
    return None
