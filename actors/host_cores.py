"""How many CPU cores this machine has for this process."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Return how many cores this process, and those that it starts, may use: under taskset those that it is given."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
