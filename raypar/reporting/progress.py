"""The progress display of a run: a live bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import median

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from raypar.actors.specs.run import Run
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.loss_text import NO_LOSS, loss_text, metric_rows
from raypar.reporting.report import Report, unit_of
from raypar.reporting.run_folder.append import heard
from raypar.reporting.screen import ScreenHandler, error_console, printable, show_text
from raypar.schedules.drawing.notebook import in_notebook
from raypar.schedules.float_sum import float_sum

log = logging.getLogger("raypar")

_BAR = 16  # columns of the bar
_DROPPED = (  # first what goes first
    "memory",
    "bubble",
    "mfu",
    "norm",
    "bar",
    "experts",
    "scale",
    "speed",
    "loss",
    "skipped",
)


@contextmanager
def display(run: Run, steps: int) -> Iterator[Callable[[Report | Evaluation], None]]:
    """Show the progress of a run within the block: a bar if standard error is a terminal, otherwise log lines.

    Args:
        run: The run.
        steps: The number of steps after which it ends.

    Yields:
        The function that shows a report or an evaluation.
    """
    console = _moving_console()
    if console is None:
        with on_screen():
            yield _Lines(steps, unit_of(run)).show
        return
    bar = _Bar(steps, unit_of(run))
    with Live(bar, console=console) as live:
        try:
            yield partial(_update, console, bar)
        except Exception:
            live.transient = True  # the log has printed the error above the bar, and its notes follow
            raise


@contextmanager
def launching(actors: int) -> Iterator[None]:
    """Show within the block that a run's actors start, and for how long they do, if standard error is a terminal."""
    what, console = f"starting {actors} actor{'s' * (actors != 1)}", error_console()
    if console is None or console.is_dumb_terminal:
        if console is not None:
            show_text(console, what)
        yield
        return
    turning = SpinnerColumn("dots" if console.encoding.startswith("utf") else "line", style="ok")
    columns = turning, TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


def _moving_console() -> Console | None:
    """Return the console of standard error if it is a terminal that can draw a line anew, else None."""
    console = error_console()
    return None if console is None or console.is_dumb_terminal else console


@contextmanager
def on_screen() -> Iterator[None]:
    """Show the log lines within the block, even if the user's script has not set up logging."""
    if heard():
        yield
        return
    handler, level = ScreenHandler(sys.stdout if in_notebook() else None), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _update(console: Console, bar: _Bar, outcome: Report | Evaluation) -> None:
    """Show an outcome in a live bar on a terminal."""
    if isinstance(outcome, Report):
        bar.add(outcome)
    else:
        show_text(console, printable(evaluation_line(outcome)))


class _TimeLeft:
    """How long a run still takes, by the median of its latest steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._recent = deque[float](maxlen=50)  # step times in milliseconds

    def after(self, report: Report) -> str:
        """Count a step, and return the time that is left after it."""
        self._recent.append(report.step_ms)
        return _clock(median(self._recent) * (self._steps - report.step - 1) / 1e3)


class _Bar:
    """The line of a run under way: the step and the time that is left, and what else the terminal has columns for."""

    def __init__(self, steps: int, unit: str) -> None:
        self._steps, self._unit, self._time = steps, unit, _TimeLeft(steps)
        self._taken, self._left, self._figures = 0, "-:--:--", dict[str, str]()

    def add(self, report: Report) -> None:
        """Take the figures of a step."""
        self._taken, self._left = report.step + 1, self._time.after(report)
        self._figures = _named_figures(report, self._unit)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the line, without the figures for which there are too few columns."""
        count = f"{self._taken:{len(str(self._steps))}}/{self._steps}"
        drawn = self._drawn(options.ascii_only)
        parts = {"step": f"step {count}", "bar": drawn.plain, "left": f"{self._left} left", **self._figures}
        for name in _DROPPED:
            if _columns(parts) <= options.max_width:
                break
            parts.pop(name, None)
        if _columns(parts) > options.max_width:
            parts = {"step": count.strip(), "left": self._left}
        text = Text("  ").join(drawn if name == "bar" else Text(part) for name, part in parts.items())
        yield text if _columns(parts) <= options.max_width else Text(f"{count.strip()} {self._left}")

    def _drawn(self, ascii_only: bool) -> Text:
        """Draw how much is done."""
        done = round(_BAR * min(1.0, self._taken / max(1, self._steps)))
        full, empty = "#-" if ascii_only else "\u2501\u2500"
        return Text.assemble((full * done, "figure"), (empty * (_BAR - done), "name"))


def _columns(parts: Mapping[str, str]) -> int:
    return len("  ".join(parts.values()))


class _Lines:
    """Log lines: about fifty in a run, and at most one a second if the run has more than fifty steps."""

    def __init__(self, steps: int, unit: str) -> None:
        self._steps, self._unit = steps, unit
        self._every = max(1, steps // 50)
        self._last, self._time = 0.0, _TimeLeft(steps)

    def show(self, outcome: Report | Evaluation) -> None:
        if isinstance(outcome, Evaluation):
            log.info("%s", evaluation_line(outcome))
            return
        left = self._time.after(outcome)
        if outcome.step % self._every == 0 or outcome.step + 1 == self._steps:
            now = time.monotonic()
            if self._steps <= 50 or now - self._last >= 1.0 or outcome.step + 1 == self._steps:
                self._last = now
                step = f"step {outcome.step + 1:{len(str(self._steps))}}/{self._steps}"
                log.info("%s  %s  %s left", step, _figures(outcome, self._unit), left)


def _figures(report: Report, unit: str) -> str:
    """Format a step as one line."""
    return "  ".join(_named_figures(report, unit).values())


def _named_figures(report: Report, unit: str) -> dict[str, str]:
    """Format the figures of a step. The memory is that of the pipeline rank with the most."""
    scale = "" if report.loss_scale is None else f"scale {report.loss_scale:g}"
    figures = {
        "skipped": "skipped" * report.skipped,
        "scale": scale,
        "loss": f"loss {_loss(report)}",
        "experts": _experts(report),
        "norm": f"grad {_short(report.grad_norm, 3)}",
        "speed": f"{report.per_second(unit):,.0f} {unit}/s",
        "mfu": report.utilisation,
        "bubble": f"bubble {report.bubble:.0%}",
        "memory": f"{max(report.peak_memory, default=0) / 2**30:.2f} GiB",
    }
    return {name: figure for name, figure in figures.items() if figure}


def _loss(report: Report) -> str:
    return NO_LOSS if report.loss is None else _short(report.loss, 4)


def _experts(report: Report) -> str:
    """Format the auxiliary losses, added up, and the load of the experts: max/mean, and the share of drops."""
    texts = [f"aux {_short(float_sum(report.aux.values()), 4)}"] if report.aux else []
    if report.loads is not None:
        texts.append(f"load {report.loads.max_load:.2f}")
        texts += [f"dropped {report.loads.dropped:.1%}"] if report.loads.dropped else []
    return "  ".join(texts)


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
