"""Progress of a data conversion: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_LEAST_BYTES = 8 << 20  # fewer are converted before a bar is of use
_INTERVAL = 10.0  # seconds between two lines


@contextmanager
def conversion_progress(size: int) -> Iterator[Callable[[int], None]]:
    """Show how many bytes are read, during the ``with`` block.

    Args:
        size: Bytes of all files.

    Yields:
        A function to call with the number of further bytes that were read.
    """
    if size < _LEAST_BYTES:
        yield lambda more: None
    elif sys.stderr.isatty():
        with _bar(size) as advance:
            yield advance
    else:
        yield _Lines(size).advance


@contextmanager
def _bar(size: int) -> Iterator[Callable[[int], None]]:
    # imported here: it takes 50 ms, and small conversions show nothing
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = TextColumn("converting"), BarColumn(16), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=size)
        yield lambda more: progress.advance(task, more)


class _Lines:
    """Log lines, one every few seconds."""

    def __init__(self, size: int) -> None:
        self._size, self._read = size, 0
        self._began = self._last = time.monotonic()

    def advance(self, more: int) -> None:
        """Count bytes that were read, and log a line if the last one is old enough."""
        self._read += more
        now = time.monotonic()
        if now - self._last >= _INTERVAL:
            self._last, speed = now, self._read / (now - self._began)
            left = max(0, self._size - self._read) / speed
            log.info("converted %.0f%%, %.1f MB/s, %.0f s left", 100 * self._read / self._size, speed / 1e6, left)
