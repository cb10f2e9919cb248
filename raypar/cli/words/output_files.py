"""Output files that a flag of a command names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from raypar.actors.machine.files import WholeFile
from raypar.errors import ConfigError, JobError
from raypar.schedules.drawing.files import is_stream

Write = Callable[[str], object]


def output_file_faults(flag: str, path: Path | None) -> Iterator[str]:
    """Yield the reasons why a file cannot be written, as far as they are known before writing.

    Args:
        flag: The flag that names the file, for messages.
        path: The file; None if the flag was not given.
    """
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
    """Open a file to which lines are appended, each readable at once.

    Args:
        flag: The flag that names the file, for messages.
        path: The file, which is overwritten; None to write nothing.

    Yields:
        A function that appends text.

    Raises:
        ConfigError: The file can't be opened.
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
    """Open a file that is written in one piece, atomically unless it is a device or a pipe.

    Args:
        flag: The flag that names the file, for messages.
        path: The file, which is overwritten; None to write nothing.

    Yields:
        A function that writes the file's whole text. It raises JobError if that fails.

    Raises:
        ConfigError: The file can't be opened. This is raised before the body of the ``with`` block runs.
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
