"""Measuring again what was disturbed: a virtual machine knows for how long its cores were taken from it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

CALM = 0.02  # share of the cores' time; more is measured again
ATTEMPTS = 5  # at most
_STAT = Path("/proc/stat")
_STEAL = 8  # the column of a core's line


@dataclass(frozen=True)
class Measured(Generic[T]):
    """What counts.

    stolen    share of the cores' time that was taken away meanwhile
    attempts  how often it was measured
    """

    value: T
    stolen: float
    attempts: int


def calmly(measure: Callable[[], T], stolen: Callable[[], float] | None = None) -> Measured[T]:
    """What ``measure`` returns the first time that the machine is calm; of ``ATTEMPTS`` the calmest, if it never is.

    What was measured plays no part in the choice. ``stolen`` is ``seconds_stolen`` but in tests.
    """
    read, found = stolen or seconds_stolen, list[tuple[float, T]]()
    while not found or (len(found) < ATTEMPTS and found[-1][0] > CALM):
        start, before = time.perf_counter(), read()
        value = measure()
        cores = (time.perf_counter() - start) * (os.cpu_count() or 1)
        found.append(((read() - before) / cores, value))
    share, value = min(found, key=itemgetter(0))
    return Measured(value, share, len(found))


def seconds_stolen() -> float:
    """Since the machine started, of all cores: wanted here, and given to somebody else (Linux; elsewhere 0)."""
    try:
        every_core = _STAT.read_text().partition("\n")[0].split()
    except OSError:
        return 0.0
    return int(every_core[_STEAL]) / os.sysconf("SC_CLK_TCK") if len(every_core) > _STEAL else 0.0
