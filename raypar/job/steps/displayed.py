"""The display of a training: outcomes are shown as they come, and a step that is taken again is reported once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from raypar.actors.specs.run import Run
from raypar.job.steps.notebook_cell import in_cell
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.progress import display
from raypar.reporting.report import Report
from raypar.reporting.report_table import Reports
from raypar.reporting.scale_warnings import unchanged
from raypar.schedules.drawing.notebook import in_notebook

log = logging.getLogger(__name__)

Callback: TypeAlias = Callable[[Report | Evaluation], object]


def displayed(
    run: Run, last: int, outcomes: Iterable[Report | Evaluation], on: Callback | Sequence[Callback] | None
) -> Reports:
    """Show the outcomes of training, and return the reports.

    Args:
        run: The run.
        last: Number of steps taken at the end.
        outcomes: The outcomes.
        on: Called with each; or several, which are called in their order.
    """
    reports = Reports()
    calls = [] if on is None else [on] if callable(on) else [*on]
    with (in_cell if in_notebook() else display)(run, last) as show:
        for outcome in outcomes:
            show(outcome)
            for call in calls:
                call(outcome)
            if isinstance(outcome, Report):
                while reports and reports[-1].step >= outcome.step:  # taken again, after a failure
                    reports.pop()
                reports.append(outcome)
    if (reason := unchanged(run, reports)) is not None:
        log.warning("%s", reason)
    return reports
