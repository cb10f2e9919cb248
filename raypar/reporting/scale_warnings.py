"""Warn of a loss scale that has no room left."""

from __future__ import annotations

from collections import deque

from raypar.actors.optim.stuck_scale import WINDOWS, stuck_scale
from raypar.actors.specs.precision import LossScale
from raypar.reporting.report import Report


class ScaleWarnings:
    """Tells once that the loss scale is stuck, and again only after it was not.

    Args:
        spec: The run's loss scaling.
    """

    def __init__(self, spec: LossScale) -> None:
        self._spec, self._is_stuck = spec, False
        self._history: deque[tuple[float, bool]] = deque(maxlen=WINDOWS * spec.window)

    def of(self, report: Report) -> str | None:
        """Return what to say of the scale after a step; None if there is nothing new."""
        if report.loss_scale is None or report.loss is None:
            return None
        self._history.append((report.loss_scale, report.skipped))
        told = stuck_scale(tuple(self._history), self._spec.floor, self._spec.window)
        is_new, self._is_stuck = told is not None and not self._is_stuck, told is not None
        return f"step {report.steps_taken:,}: {told}" if is_new else None
