"""Writing drawings to files. The file's suffix selects the kind of drawing; a file is written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from raypar.schedules.drawing.chrome_trace import chrome_trace
from raypar.schedules.drawing.svg import svg
from raypar.schedules.drawing.text import text
from raypar.schedules.reading.torch_csv import to_csv
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.simulation.simulate import UNIT, simulate_to_deadlock
from raypar.schedules.timeline import Timeline


def drawings(drawn: Schedule | Timeline) -> dict[str, Callable[[], str]]:
    """Return the kinds of drawing of a schedule or a timeline.

    Args:
        drawn: The schedule or timeline.

    Returns:
        For each file suffix (".svg", ".txt", ".json", and ".csv" for a schedule) a function that returns its text.
    """
    kinds = {".svg": lambda: svg(drawn), ".txt": lambda: text(drawn, width=None)}
    if isinstance(drawn, Schedule):
        trace = {
            ".csv": lambda: to_csv(drawn),
            ".json": lambda: json.dumps(chrome_trace(simulate_to_deadlock(drawn, UNIT)[0])),
        }
    else:
        trace = {".json": lambda: json.dumps(chrome_trace(drawn))}
    return kinds | trace


def save_drawing(drawn: Schedule | Timeline, path: str | Path) -> Path:
    """Write a schedule or a timeline as the kind of drawing that the path's ending names; return the path.

    Raises ScheduleError if there is no such kind, and OSError if the file can't be written.
    """
    return save(path, drawings(drawn))


def save(path: str | Path, kinds: Mapping[str, Callable[[], str]], suffix: str | None = None) -> Path:
    """Write a drawing to a file.

    Args:
        path: The file.
        kinds: For each suffix a function that returns the text; see ``drawings``.
        suffix: The suffix that selects the kind, or None for that of ``path``.

    Returns:
        The path.

    Raises:
        ScheduleError: If there is no such kind.
        OSError: If the file can't be written.
    """
    target = Path(path)
    kind = target.suffix if suffix is None else suffix
    if kind not in kinds:
        *first, last = kinds
        raise ScheduleError(f"{str(target)!r} says no kind of drawing: end it in {', '.join(first)} or {last}")
    write_text(target, kinds[kind]().rstrip("\n") + "\n")
    return target


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: to a temporary file in the same folder, then fsync, then rename.

    Args:
        path: The file. A device or a pipe is written to directly.
        text: Its text, written as UTF-8.

    Raises:
        OSError: If the file can't be written; no temporary file is left then.
    """
    if is_stream(path):
        path.write_text(text, encoding="utf-8", errors="replace")
        return
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(path.parent))
    aside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with aside.open("x", encoding="utf-8", errors="replace") as file:  # a name may be unencodable
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise


def is_stream(path: Path) -> bool:
    """Return whether the path is a device or a pipe, which can be written to but must not be replaced by a file."""
    return path.exists() and not path.is_file() and not path.is_dir()
