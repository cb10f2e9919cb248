"""What raypar logs, as a file with time stamps."""

from __future__ import annotations

import logging
from contextlib import suppress

from raypar.folder.lines import Lines

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
