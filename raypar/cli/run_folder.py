"""The commands for run folders: ``raypar report`` and ``raypar trace``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from raypar.cli.output_files import file_faults
from raypar.errors import ConfigError
from raypar.reporting.html.page import page
from raypar.reporting.run_folder.read import Past, read
from raypar.schedules.drawing.chrome_trace import chrome_trace
from raypar.schedules.drawing.files import write_text

Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Out = Annotated[Path | None, tyro.conf.arg(aliases=("-o",))]


def run(command: str, words: Sequence[str]) -> str:
    """Run ``raypar report`` or ``raypar trace``.

    Args:
        command: "report" or "trace".
        words: The words after the command.

    Returns:
        A line that says which file was written.

    Raises:
        ConfigError: The run folder can't be read, or the file can't be written.
    """
    commands: dict[str, Callable[..., str]] = {"report": report, "trace": trace}
    return tyro.cli(commands[command], prog=f"raypar {command}", args=list(words))


def report(folder: Folder, out: Out = None) -> str:
    """Write one HTML file about a run: figures, losses, speed, the latest step and its prediction, memory, messages.

    Args:
        folder: the run's folder
        out: the file, overwritten if it exists; None: report.html in the folder
    """
    return _written(folder, out, "report.html", page)


def trace(folder: Folder, out: Out = None) -> str:
    """Write the latest measured step of a run as a Chrome trace, for ui.perfetto.dev.

    Args:
        folder: the run's folder
        out: the file, overwritten if it exists; None: trace.json in the folder
    """
    return _written(folder, out, "trace.json", _trace)


def _trace(past: Past) -> str:
    if not past.timelines:
        raise ConfigError([f"run folder {str(past.folder)!r} has no measured step: train one"])
    return json.dumps(chrome_trace(*past.timelines)) + "\n"


def _written(folder: Path, out: Path | None, name: str, made: Callable[[Past], str]) -> str:
    target = out or folder / name
    if faults := list(file_faults("--out", target)) if out else []:
        raise ConfigError(faults)
    text = made(read(folder))
    try:
        write_text(target, text)
    except OSError as error:
        raise ConfigError([f"{str(target)!r} can't be written ({error.strerror}): give another --out"]) from error
    return f"written: {target}"
