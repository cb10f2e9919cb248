"""Files that grow line by line: what could not be written whole is not there at all."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path


class Lines:
    """A plain file that lines are added to; made if it is not there. Nothing is kept back: a line can be read at once.

    Raises OSError, also for a link, a pipe or a device.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._file: int | None = os.open(path, flags, 0o666)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            self.close()
            raise OSError(errno.EINVAL, "it is no plain file")

    def lock(self) -> None:
        """Keep other processes' ``lock`` away until this one closes or ends. Raises BlockingIOError if one has it."""
        assert self._file is not None
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def add(self, line: str) -> None:
        """Add a line, which ends with a newline. Raises OSError, and then nothing of it is left."""
        if self._file is None:
            return
        rest, size = memoryview(line.encode(errors="replace")), os.fstat(self._file).st_size
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, size)
            raise

    def close(self) -> None:
        """Let go of the file; what is added after that is lost."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


log = logging.getLogger("raypar")


class LogFile(logging.Handler):
    """Adds what the logger "raypar" says to a file. A line that the disk refuses is lost."""

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S%z"))

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self._lines.add(self.format(record) + "\n")
        # where nobody has set up logging, Python says warnings on standard error, but not beside a handler
        if logging.lastResort is not None and record.levelno >= logging.lastResort.level and not heard():
            logging.lastResort.handle(record)


def heard() -> bool:
    """Whether anyone but files hears what the logger "raypar" says."""
    logger: logging.Logger | None = log
    while logger is not None:
        if not all(isinstance(handler, LogFile) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False
