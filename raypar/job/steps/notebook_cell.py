"""The progress of a training in a cell of a notebook: a bar, figures and the curve of the loss.

One output of the cell is drawn again and again, and its last drawing stays in the file.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from statistics import median

from markupsafe import Markup

from raypar.actors.specs.run import Run
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.html.charts import ChartLine, line_chart
from raypar.reporting.html.markup import element, note
from raypar.reporting.progress import evaluation_line, on_screen
from raypar.reporting.report import Report, unit_of
from raypar.schedules.formatting import duration

_SECONDS = 0.5  # between two drawings, at the least
_SHARE = 0.02  # of the time that drawing may take
_RECENT = 50  # steps whose median says how long the rest takes


@contextmanager
def in_cell(run: Run, steps: int) -> Iterator[Callable[[Report | Evaluation], None]]:
    """Show the progress of a run within the block in the output of the present cell; see ``progress.display``.

    Args:
        run: The run.
        steps: The number of steps after which it ends.

    Yields:
        The function that shows a report or an evaluation.
    """
    from IPython.display import display  # it is there in a notebook

    cell = TrainingCell(steps, unit_of(run))
    with on_screen():
        handle = display(cell, display_id=True)
        redraw_at = 0.0

        def show(outcome: Report | Evaluation) -> None:
            nonlocal redraw_at
            cell.add(outcome)
            if (begun := time.monotonic()) >= redraw_at:
                handle.update(cell)
                now = time.monotonic()
                redraw_at = now + max(_SECONDS, (now - begun) / _SHARE)

        try:
            yield show
        finally:
            cell.end()
            handle.update(cell)


class TrainingCell:
    """A training as a cell shows it.

    Args:
        steps: The number of steps after which it ends.
        unit: What its throughput counts.
    """

    def __init__(self, steps: int, unit: str) -> None:
        self._steps, self._unit = steps, unit
        self._begun, self._seconds = time.monotonic(), math.nan  # the second: of all of it, once it is over
        self._losses, self._validated = dict[float, float](), dict[float, float]()
        self._recent = deque[float](maxlen=_RECENT)  # step times in seconds
        self._last: Report | None = None
        self._evaluation: Evaluation | None = None

    def add(self, outcome: Report | Evaluation) -> None:
        """Take the figures of a step or of an evaluation. A step that is taken again replaces its first report."""
        loss = math.nan if outcome.loss is None else outcome.loss
        if isinstance(outcome, Report):
            self._last = outcome
            self._losses[outcome.steps_taken] = loss
            self._recent.append(outcome.step_ms / 1e3)
        else:
            self._evaluation = outcome
            self._validated[outcome.steps_taken] = loss

    def end(self) -> None:
        """Note that no further step is taken."""
        self._seconds = time.monotonic() - self._begun

    def __repr__(self) -> str:
        return "  ".join(" ".join(filter(None, each)) for each in self._figures())

    def _repr_html_(self) -> str:
        share = f"width: {100 * min(1.0, self._taken / self._steps):.1f}%"
        figures = (element("span", f"{name} ", element("b", value)) for name, value in self._figures())
        return element(
            "div",
            element("style", Markup(_style())),
            element("div", *figures, class_="figures"),
            element("div", element("div", style=share), class_="done"),
            *([self._curves()] if self._losses else []),
            *([] if self._evaluation is None else [note(evaluation_line(self._evaluation))]),
            class_="raypar-cell",
        )

    @property
    def _taken(self) -> int:
        return 0 if self._last is None else self._last.steps_taken

    def _figures(self) -> Iterator[tuple[str, str]]:
        """Yield the figures that are shown: their names, and their values as texts."""
        yield "step", f"{self._taken:,}/{self._steps:,}"
        if self._last is not None:
            yield from self._last.in_brief(self._unit).items()
        if not math.isnan(self._seconds):
            yield "took", duration(self._seconds)
        elif self._recent:
            yield "left", duration(median(self._recent) * (self._steps - self._taken))

    def _curves(self) -> Markup:
        curves = (("loss", self._losses, "one"), ("validation loss", self._validated, "two"))
        lines = [ChartLine(name, sorted(points.items()), color) for name, points, color in curves if points]
        return line_chart(lines, lambda value: f"{value:.4g}", named=True)


@cache
def _style() -> str:
    """Return the style sheets of a cell: that of the report's charts, within the cell only, and its own."""
    charts = files("raypar.reporting.html").joinpath("style.css").read_text()
    own = files("raypar.job.steps").joinpath("notebook_cell.css").read_text()
    return f".raypar-cell {{ {charts} }}\n{own}"
