"""Files that grow line by line: what could not be written whole is not there at all."""

from __future__ import annotations

import errno
import fcntl
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
