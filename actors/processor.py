"""Which processor this is."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


@cache
def of_intel() -> bool:
    """Whether MKL, which torch's own products of float32 go through, is at its best here; False where Linux does not
    tell."""
    try:
        return "GenuineIntel" in _CPUINFO.read_text()
    except OSError:
        return False
