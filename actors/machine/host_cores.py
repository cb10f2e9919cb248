"""The number of CPU cores of this process."""

from __future__ import annotations

import os

from raypar.actors.machine.system_features import has_feature


def num_cores() -> int:
    """Return the number of cores that this process and its children may use; taskset can limit it."""
    return len(os.sched_getaffinity(0)) if has_feature("core_affinity") else os.cpu_count() or 1
