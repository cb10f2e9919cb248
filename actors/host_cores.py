"""How many CPU cores this machine has for this process."""

from __future__ import annotations

import os

from raypar.actors.system_features import has_feature


def num_cores() -> int:
    """Return how many cores this process, and those that it starts, may use: under taskset those that it is given."""
    return len(os.sched_getaffinity(0)) if has_feature("core_affinity") else os.cpu_count() or 1
