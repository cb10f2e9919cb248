"""The commands for run folders: ``raypar report`` and ``raypar trace``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from raypar.cli.words.arguments import Arguments, CommandOutcome, parse_command
from raypar.cli.words.output_files import output_file_faults
from raypar.errors import ConfigError
from raypar.paths import COMPARISON, REPORT, TRACE
from raypar.planner.hardware.peak_flops import DeviceName, peak_of
from raypar.reporting.html.compare import comparison
from raypar.reporting.html.figures import History
from raypar.reporting.html.forecast import comparisons
from raypar.reporting.html.live import EVERY, Live
from raypar.reporting.html.markup import document
from raypar.reporting.html.page import page, unread
from raypar.reporting.profiles import merged_profiles
from raypar.reporting.run_folder.read import Past, read, salvage
from raypar.schedules.drawing.chrome_trace import chrome_trace
from raypar.schedules.drawing.files import write_text
from raypar.schedules.formatting import steps_in_words

Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Folders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
Out = Annotated[Path | None, tyro.conf.arg(aliases=("-o",))]
PORT = 8642
_TRACE = """\
Write the latest measured step of a run as a Chrome trace, for ui.perfetto.dev; of a run with --profile the profiled
steps, with what torch's profiler has recorded."""
_REPORT = """\
Write one HTML file about a run: curves, speed, the latest step and its prediction, memory, messages, settings.

Of several runs, the file compares them: the settings that differ, and their curves over each other. What can't be read
of a damaged folder is listed, in the file and here, and the rest is shown."""


@dataclass(frozen=True)
class ReportArgs:
    """The words after ``raypar report``."""

    folders: Folders
    """the folder of a run, or of several to compare"""
    out: Out = None
    """the file, overwritten if it exists; None: report.html in the folder, or comparison.html in the first one"""
    live: bool = False
    """serve the page on this machine instead, and refresh it while training goes on, until Ctrl-C"""
    port: int = PORT
    """where --live serves it; 0: any port that is free"""
    peak: float | DeviceName | None = None
    """peak FLOP/s of the device of one actor, or its name, for model FLOPs utilisation; None: that is left out"""

    def faults(self) -> Iterator[str]:
        """Yield which values are out of range or do not go together."""
        seen = [folder.resolve() for folder in self.folders]
        twice = [folder for index, folder in enumerate(self.folders) if seen[index] in seen[:index]]
        yield from (f"{str(folder)!r} is given twice: give each run once" for folder in dict.fromkeys(twice))
        if self.live and self.out is not None:
            yield "--live serves the page and writes no file: leave --out away"
        if not self.live and self.port != PORT:
            yield f"--port {self.port} is where --live serves the page: add --live"
        if not 0 <= self.port < 1 << 16:
            yield f"--port is {self.port}: it must be from 0 to 65535"
        if isinstance(self.peak, int | float) and not 0 < self.peak < float("inf"):
            yield f"--peak is {self.peak}: give the FLOP/s that the device of one actor could do, such as 312e12"


@dataclass(frozen=True)
class TraceArgs(Arguments):
    """The words after ``raypar trace``."""

    folder: Folder
    """the run's folder"""
    out: Out = None
    """the file, overwritten if it exists; None: trace.json in the folder"""


class _Page(NamedTuple):
    """A page of runs.

    Attributes:
        html: The page.
        path: The default path of the file.
        poor: What can't be read of damaged folders.
        lost: Why other folders are no runs.
        lines: Lines that the terminal shows too.
    """

    html: str
    path: Path
    poor: Sequence[str]
    lost: Sequence[str]
    lines: Sequence[str] = ()


def run_report(words: Sequence[str], say: Callable[[str], object]) -> CommandOutcome:
    """Run ``raypar report``.

    Args:
        words: The words after the command.
        say: Prints a line before the command ends.

    Returns:
        Which file was written.

    Raises:
        ConfigError: The run folder can't be read, or the file can't be written.
    """
    missing = "a run folder is missing: raypar report RUN, or several to compare them"
    done = report(parse_command(ReportArgs(()), words, "report", _REPORT, missing))
    if isinstance(done, CommandOutcome):
        return done
    say(f"{done.url} shows the run while it goes on; Ctrl-C ends this")
    done.serve()
    return CommandOutcome("the page is not served any more")


def report(args: ReportArgs) -> CommandOutcome | Live:
    """Run ``raypar report``, and return which file was written, or the server of the page."""
    folders, peak = args.folders, peak_of(args.peak)
    if args.live:
        _page(folders, peak)
        return Live(lambda: _served(folders, peak), args.port)
    made = _page(folders, peak)
    ConfigError.raise_if(made.lost)
    written = _written(args.out or made.path, args.out, made.html)
    lines = [*made.lines, written, *(f"could not be read: {fault}" for fault in made.poor)]
    return CommandOutcome("\n".join(lines))


def run_trace(words: Sequence[str]) -> str:
    """Run ``raypar trace``, and return a line that says which file was written. Raises what ``run_report`` raises."""
    missing = "a run folder is missing: raypar trace RUN"
    args = parse_command(TraceArgs(Path()), words, "trace", _TRACE, missing)
    past = read(args.folder)
    merged = merged_profiles(past.folder, past.schedule)
    if merged.trace is not None:
        written = _written(args.out or args.folder / TRACE, args.out, json.dumps(merged.trace) + "\n")
        left_out = [f"left out: {fault}" for fault in merged.faults]
        return "\n".join([f"{written} (profile of {steps_in_words(merged.steps)})", *left_out])
    ConfigError.raise_if(f"run folder {str(past.folder)!r}: {fault}" for fault in merged.faults)
    if past.step is None or not past.timelines:
        raise ConfigError([f"run folder {str(past.folder)!r} has no measured step: train one"])
    made = json.dumps(chrome_trace(*past.timelines)) + "\n"
    return f"{_written(args.out or args.folder / TRACE, args.out, made)} (step {past.step + 1:,})"


def _served(folders: tuple[Path, ...], peak: float | None) -> str:
    """Make the page as it is served; it says so if no folder can be read any more, as after a launch that failed."""
    try:
        return _page(folders, peak, EVERY).html
    except ConfigError as error:
        return document("raypar", unread(error.faults), EVERY)


def _page(folders: tuple[Path, ...], peak: float | None, every: int | None = None) -> _Page:
    """Make the page of one or several runs from what can be read of their folders. Raises ConfigError if none is."""
    pasts, poor, lost = list[Past](), list[str](), list[str]()
    for folder in folders:
        try:
            past, faults = salvage(folder)
        except ConfigError as error:
            lost += error.faults
        else:
            pasts.append(past)
            poor += [f"{past.folder}: {fault}" for fault in faults]
    if not pasts:
        raise ConfigError(lost)
    folder = pasts[0].folder
    if len(pasts) > 1:
        return _Page(comparison(pasts, faults=[*poor, *lost], every=every), folder / COMPARISON, poor, lost)
    shown = page(pasts[0], faults=[*poor, *lost], peak=peak, every=every)
    return _Page(shown, folder / REPORT, poor, lost, _predicted(pasts[0]))


def _predicted(past: Past) -> list[str]:
    """Say how far the prediction before a run was from what its steps took."""
    if past.forecast is None or not past.metrics:
        return []
    rows = [f"{one.name}: {one}" for one in comparisons(past.forecast, History.of(past))]
    source = f"predicted {past.forecast.source}"
    return [*rows, f"{source}; {past.forecast.better}" if past.forecast.better else source]


def _written(target: Path, out: Path | None, text: str) -> str:
    """Write a file and return a line that says so. ``out`` is the path that a flag gave, if one did."""
    ConfigError.raise_if(output_file_faults("--out", target if out else None))
    try:
        write_text(target, text)
    except OSError as error:
        raise ConfigError([f"{str(target)!r} can't be written ({error.strerror}): give another --out"]) from error
    return f"written: {target}"
