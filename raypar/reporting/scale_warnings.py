"""Warn of a loss scale that cannot fall any more, and of runs in which no step changes a weight."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from raypar.actors.optim.stuck_scale import WINDOWS, stuck_scale
from raypar.actors.specs.precision import LossScale
from raypar.actors.specs.run import Run
from raypar.reporting.report import Report


class ScaleWarnings:
    """Warns once that the loss scale is stuck, and again only after it was not.

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
        warning = stuck_scale(tuple(self._history), self._spec.floor, self._spec.window)
        is_new, self._is_stuck = warning is not None and not self._is_stuck, warning is not None
        return f"step {report.steps_taken:,}: {warning}" if is_new else None


def unchanged(run: Run, reports: Sequence[Report]) -> str | None:
    """Say that no step has changed a weight, and what to lower; None if one has, or if there was none.

    Args:
        run: The run.
        reports: The reports of its steps.
    """
    if not reports or not all(report.skipped for report in reports):
        return None
    count, scale = f"none of the {len(reports):,} steps has changed a weight", reports[-1].loss_scale
    if all(report.loss is None for report in reports):
        return f"{count}, for no target of theirs counts: correct the targets, or those that are ignored"
    if scale is not None:
        fix = f"lower loss_scale.init {run.loss_scale.init:g} ({scale:g} by now) or optim.lr, or compute in bf16"
        return f"{count}: each overflowed in {run.precision.compute}: {fix}"
    return f"{count}: no loss or gradient was finite: lower optim.lr, make the warm-up longer, and look at the data"
