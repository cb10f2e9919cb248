"""The progress display of a run: a live bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from raypar.actors.specs.run import Run
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.loss_text import NO_LOSS, loss_text, metric_rows
from raypar.reporting.report import Report, unit_of
from raypar.reporting.run_folder.append import heard
from raypar.schedules.drawing.notebook import in_notebook
from raypar.schedules.float_sum import float_sum

log = logging.getLogger("raypar")


@contextmanager
def display(run: Run, steps: int) -> Iterator[Callable[[Report | Evaluation], None]]:
    """Show the progress of a run within the block: a bar if standard error is a terminal, otherwise log lines.

    Args:
        run: The run.
        steps: The number of steps after which it ends.

    Yields:
        The function that shows a report or an evaluation.
    """
    if not sys.stderr.isatty():
        with on_screen():
            yield _Lines(steps, unit_of(run)).show
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield partial(_update, progress, progress.add_task("train", total=steps, figures=""), unit_of(run))


@contextmanager
def on_screen() -> Iterator[None]:
    """Show the log lines within the block, even if the user's script has not set up logging."""
    if heard():
        yield
        return
    handler, level = logging.StreamHandler(sys.stdout if in_notebook() else None), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _update(progress: Progress, task: TaskID, unit: str, outcome: Report | Evaluation) -> None:
    """Show an outcome in a live bar on a terminal."""
    if isinstance(outcome, Report):
        progress.update(task, completed=outcome.step + 1, figures=_figures(outcome, unit))
    else:
        progress.console.print(evaluation_line(outcome), highlight=False)


class _Lines:
    """Log lines: about fifty in a run, and at most one a second if the run has more than fifty steps."""

    def __init__(self, steps: int, unit: str) -> None:
        self._steps, self._unit = steps, unit
        self._every = max(1, steps // 50)
        self._last = 0.0
        self._recent = deque[float](maxlen=50)  # step times in milliseconds

    def show(self, outcome: Report | Evaluation) -> None:
        if isinstance(outcome, Evaluation):
            log.info("%s", evaluation_line(outcome))
            return
        self._recent.append(outcome.step_ms)
        if outcome.step % self._every == 0 or outcome.step + 1 == self._steps:
            now = time.monotonic()
            if self._steps <= 50 or now - self._last >= 1.0 or outcome.step + 1 == self._steps:
                self._last = now
                left = median(self._recent) * (self._steps - outcome.step - 1) / 1e3
                step = f"step {outcome.step + 1:{len(str(self._steps))}}/{self._steps}"
                log.info("%s  %s  %s left", step, _figures(outcome, self._unit), _clock(left))


def _figures(report: Report, unit: str) -> str:
    """Format a step as one line. The memory is that of the pipeline rank with the most."""
    scale = "" if report.loss_scale is None else f"scale {report.loss_scale:g}  "
    start = f"{'skipped  ' if report.skipped else ''}{scale}loss {_loss(report)}{_experts(report)}"
    return (
        f"{start}  grad {_short(report.grad_norm, 3)}  {report.per_second(unit):,.0f} {unit}/s  "
        f"bubble {report.bubble:.0%}  {max(report.peak_memory, default=0) / 2**30:.2f} GiB"
    )


def _loss(report: Report) -> str:
    return NO_LOSS if report.loss is None else _short(report.loss, 4)


def _experts(report: Report) -> str:
    """Format the auxiliary losses, added up, and the load of the experts: max/mean, and the share of drops."""
    aux = f"  aux {_short(float_sum(report.aux.values()), 4)}" if report.aux else ""
    if report.loads is None:
        return aux
    return f"{aux}  load {report.loads.max_load:.2f}" + (
        f"  dropped {report.loads.dropped:.1%}" if report.loads.dropped else ""
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _short(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if abs(value) < 1e4 else f"{value:.3g}"


def evaluation_line(evaluation: Evaluation) -> str:
    """Return an evaluation as a line."""
    further = "" if evaluation.perplexity is None else f", perplexity {evaluation.perplexity:.2f}"
    further += "" if evaluation.bits_per_byte is None else f", {evaluation.bits_per_byte:.3f} bits per byte"
    further += "".join(f", {name} {value}" for name, value in metric_rows(evaluation.metrics))
    of_averages = " of the averaged weights" if evaluation.is_averaged else ""
    return f"after step {evaluation.step}: validation loss{of_averages} {loss_text(evaluation.loss)}{further}"
