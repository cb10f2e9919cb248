"""Files that a command was asked to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from raypar.actors.files import WholeFile
from raypar.errors import ConfigError, JobError
from raypar.schedules.drawing.files import is_stream

Write = Callable[[str], object]


def file_faults(flag: str, path: Path | None) -> Iterator[str]:
    """Why a file that a flag names can't be written, as far as that is known beforehand."""
    if path is None:
        return
    try:
        if path.is_dir():
            yield f"{flag} {str(path)!r} is a folder: give a file"
        elif not path.parent.is_dir():
            yield f"{flag} {str(path)!r}: there is no folder {str(path.parent)!r}: make it, or give another path"
    except OSError as error:
        yield f"{flag} {str(path)!r} can't be written ({error.strerror}): give another path"


@contextmanager
def growing_file(flag: str, path: Path | None) -> Iterator[Write]:
    """A function that adds to a file, line by line, so that it can be read at once; without a path it does nothing.

    Raises ConfigError if the file can't be opened.
    """
    if path is None:
        yield lambda text: None
        return
    try:
        file = path.open("w", encoding="utf-8", buffering=1)
    except OSError as error:
        raise ConfigError([f"{flag} {str(path)!r} can't be written ({error.strerror}): give another path"]) from error
    with file:
        yield file.write


@contextmanager
def whole_file(flag: str, path: Path | None) -> Iterator[Write]:
    """A function that writes all of a file: beside its place, so that it is there whole or not at all; a device or a
    pipe is written as it is.

    Raises ConfigError if the file can't be made, before anything else is done, and JobError if it can't be filled.
    """
    if path is None:
        yield lambda text: None
        return
    try:
        out = path.open("wb") if is_stream(path) else WholeFile(path)
    except OSError as error:
        raise ConfigError([f"{flag} {str(path)!r} can't be written ({error.strerror}): give another path"]) from error

    def write(text: str) -> None:
        try:
            with out:
                out.write(text.encode())
                if isinstance(out, WholeFile):
                    out.commit()
        except OSError as error:
            raise JobError(f"{flag} {str(path)!r} can't be written ({error.strerror})") from error

    try:
        yield write
    finally:
        out.close()
