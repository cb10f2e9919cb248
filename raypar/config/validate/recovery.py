"""Check that this system has what recovery needs. Only a launch checks it: a plan may be for another system."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from raypar.actors.machine.system_features import REQUIREMENTS, Feature

_NEEDS: tuple[Feature, ...] = ("memory_files", "process_handles")  # for snapshots; to end an actor that hangs


def recovery_faults(max_failures: int) -> Iterator[str]:
    """Yield a fault if a run is to go on after failures, and this system lacks what that needs."""
    missing = [name for feature in _NEEDS for name in REQUIREMENTS[feature].missing()]
    if max_failures and missing:
        yield (
            f"max_failures is {max_failures}, but recovery needs {', '.join(missing)}, which this system "
            f"({sys.platform}) lacks: set max_failures to 0 and give save_every, so that a run that has failed can be "
            "launched again with resume; or launch it on Linux"
        )
