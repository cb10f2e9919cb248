"""How much of the machine is used by others than this process and its children: a bench on a shared one should say."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # of the first line of /proc/stat: idle, and waiting for a disk


class Foreign:
    """Counts what others compute (Linux)."""

    def __init__(self) -> None:
        self._last = self._now()

    def cores(self) -> float:
        """Cores that others have kept busy since the last call, and the host if it is a virtual machine."""
        before, self._last = self._last, self._now()
        return max(0.0, self._last[1] - before[1]) / max(self._last[0] - before[0], 1e-9)

    @staticmethod
    def _now() -> tuple[float, float]:
        """The time, and the seconds that others have computed."""
        numbers = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        busy = sum(int(number) for place, number in enumerate(numbers) if place not in _IDLE)
        return time.monotonic(), (busy - _own()) / _TICKS


def own_seconds() -> float:
    """Seconds that this process and its descendants have computed; those that have ended are not counted."""
    return _own() / _TICKS


def _own() -> int:
    """Ticks that this process and its descendants have computed; those that have ended are not counted."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            parents[int(entry.name)], ticks[int(entry.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    return sum(ticks[process] for process in ticks if os.getpid() in _line(process, parents))


def _line(process: int, parents: dict[int, int]) -> set[int]:
    """A process and those it descends from."""
    line = {process}
    while (process := parents.get(process, 0)) and process not in line:
        line.add(process)
    return line
