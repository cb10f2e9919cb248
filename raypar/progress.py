"""Progress of a long run: a live bar on a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from raypar.config import Run
from raypar.folder.log import heard
from raypar.report import Evaluation, Report

log = logging.getLogger("raypar")


class Display(Protocol):
    """Shows what a run produces, as it comes."""

    def show(self, outcome: Report | Evaluation) -> None: ...


@contextmanager
def display(run: Run, steps: int) -> Iterator[Display]:
    """A bar if standard error is a terminal, otherwise log lines; for a run that ends after ``steps`` steps."""
    if not sys.stderr.isatty():
        with _heard():
            yield _Lines(steps)
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield _Bar(progress, steps)


@contextmanager
def _heard() -> Iterator[None]:
    """Let a script that has not set up logging see the lines all the same."""
    if heard():
        yield
        return
    handler, level = logging.StreamHandler(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


class _Bar:
    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress, self._steps = progress, steps
        self._task = progress.add_task("train", total=steps, figures="")

    def show(self, outcome: Report | Evaluation) -> None:
        if isinstance(outcome, Report):
            self._progress.update(self._task, completed=outcome.step + 1, figures=_figures(outcome))
        else:
            self._progress.console.print(_validation(outcome), highlight=False)


class _Lines:
    """About fifty lines a run, and never two within a second unless it is short."""

    def __init__(self, steps: int) -> None:
        self._steps, self._every, self._last = steps, max(1, steps // 50), 0.0

    def show(self, outcome: Report | Evaluation) -> None:
        if isinstance(outcome, Evaluation):
            log.info("%s", _validation(outcome))
        elif outcome.step % self._every == 0 or outcome.step + 1 == self._steps:
            now = time.monotonic()
            if self._steps <= 50 or now - self._last >= 1.0 or outcome.step + 1 == self._steps:
                self._last = now
                log.info("step %*d/%d  %s", len(str(self._steps)), outcome.step + 1, self._steps, _figures(outcome))


def _figures(report: Report) -> str:
    return (
        f"loss {report.loss:.4f}  grad {report.grad_norm:.3f}  {report.tokens_per_s:,.0f} tokens/s  "
        f"{report.step_ms:.0f} ms  bubble {report.bubble:.0%}"
    )


def _validation(evaluation: Evaluation) -> str:
    return (
        f"after step {evaluation.step}: validation loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.2f}"
    )
