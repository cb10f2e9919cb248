"""Files that grow line by line; a line is in them whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Lines:
    """A regular file that lines are appended to, created if it does not exist. Writes are not buffered.

    If it is removed meanwhile, it is made again with all its lines.

    Args:
        path: The file.

    Raises:
        OSError: If the file can't be opened, or if it is a link, a pipe or a device.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._is_locked = path, False
        self._file: int | None = os.open(path, _FLAGS, 0o666)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            self.close()
            raise OSError(errno.EINVAL, "it is no plain file")

    def lock(self) -> None:
        """Lock the file until it is closed or this process ends.

        Raises:
            BlockingIOError: If another process has the lock.
        """
        assert self._file is not None
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._is_locked = True

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        """Let others lock the file in the block."""
        if self._file is None or not self._is_locked:
            yield
            return
        fcntl.flock(self._file, fcntl.LOCK_UN)
        try:
            yield
        finally:
            with suppress(BlockingIOError):  # another run has begun there meanwhile
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def add(self, line: str) -> bool:
        """Append a line. Return whether the file was gone, and was made again.

        Args:
            line: The line, which ends with a newline.

        Raises:
            OSError: If it can't be written; what was written of it is removed. Or something else is at its path.
        """
        if self._file is None:
            return False
        rest, size = memoryview(line.encode(errors="replace")), os.fstat(self._file).st_size
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, size)
            raise
        return self._is_made_again(self._file)

    def _is_made_again(self, old: int) -> bool:
        """Make the file again if there is none at its path any more; return whether that was so."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self._path.lstat(), os.fstat(old)):
                return False
            raise OSError(errno.EEXIST, f"something else is at {self._path.name}")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new, at = os.open(self._path, _FLAGS | os.O_EXCL, 0o666), 0
        try:
            while piece := os.pread(old, 1 << 20, at):
                at += os.write(new, piece)
            if self._is_locked:
                fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(new)
            self._path.unlink()
            raise
        self._file = new
        os.close(old)
        return True

    def close(self) -> None:
        """Close the file. Lines added later are dropped."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


log = logging.getLogger("raypar")


class LogFile(logging.Handler):
    """A handler that writes the messages of the logger "raypar" to a file. A line that can't be written is lost.

    While it is open, the logger passes INFO on, whatever its level is: what screens should not show is for their
    handlers to leave out.

    Args:
        lines: The file.
    """

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines, self._before = lines, log.level
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S%z"))

    def open(self) -> None:
        """Begin to write."""
        self._before = log.level
        log.addHandler(self)
        if not log.isEnabledFor(logging.INFO):
            log.setLevel(logging.INFO)

    def close(self) -> None:
        """Write no more. The logger gets the level back that it had before the first of several log files."""
        if self in log.handlers:
            log.removeHandler(self)
            others = [handler for handler in log.handlers if isinstance(handler, LogFile)]
            if others:
                others[0]._before = self._before
            else:
                log.setLevel(self._before)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Append the record to the file."""
        with suppress(OSError):
            self._lines.add(self.format(record) + "\n")
        # Without any handler Python prints warnings on standard error; this handler would suppress that.
        if logging.lastResort is not None and record.levelno >= logging.lastResort.level and not heard():
            logging.lastResort.handle(record)


def heard() -> bool:
    """Return whether the logger "raypar" has a handler other than log files."""
    logger: logging.Logger | None = log
    while logger is not None:
        if not all(isinstance(handler, LogFile) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False
