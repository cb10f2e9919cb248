"""Training as people see it: outcomes are shown as they come, and a step that is taken again is reported once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from raypar.actors.specs.run import Run
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.progress import display
from raypar.reporting.report import Report


def displayed(
    run: Run,
    last: int,
    outcomes: Iterable[Report | Evaluation],
    on: Callable[[Report | Evaluation], None] | None,
) -> list[Report]:
    """Show the outcomes of training, and return the reports.

    Args:
        run: The run.
        last: Number of steps taken at the end.
        outcomes: The outcomes.
        on: Called with each.
    """
    reports: list[Report] = []
    with display(run, last) as shown:
        for outcome in outcomes:
            shown.show(outcome)
            if on is not None:
                on(outcome)
            if isinstance(outcome, Report):
                while reports and reports[-1].step >= outcome.step:  # taken again, after a failure
                    reports.pop()
                reports.append(outcome)
    return reports
