"""Check that this system has the device, the resources and the features that a run needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from raypar.actors.machine.system_features import REQUIREMENTS, Feature
from raypar.actors.machine.this_machine import lacks_device
from raypar.actors.specs.types import DeviceChoice
from raypar.config.rules import Conflict, RunRule, RunSetting

_NEEDS: tuple[Feature, ...] = ("memory_files", "process_handles")  # for snapshots; to end an actor that hangs


def device_faults(choice: DeviceChoice) -> Iterator[str]:
    """Yield a fault if "cuda" is chosen and the torch that is installed here is built without CUDA."""
    if lacks_device(choice):
        yield "device is 'cuda', but torch is built without CUDA here: install a build with it"


RESOURCE_RULES: tuple[RunRule, ...] = (
    lambda examined: examined.run.resources.faults(),
    Conflict(
        RunSetting("resources.gpus", lambda gpus: gpus is not None),
        RunSetting("device", "cpu"),
        fix="leave one of them out",
    ),
)


def recovery_faults(max_failures: int) -> Iterator[str]:
    """Yield a fault if a run is to go on after failures, and this system lacks what that needs."""
    missing = [name for feature in _NEEDS for name in REQUIREMENTS[feature].missing()]
    if max_failures and missing:
        yield (
            f"max_failures is {max_failures}, but recovery needs {', '.join(missing)}, which this system "
            f"({sys.platform}) lacks: set max_failures to 0 and give save_every, so that a run that has failed can be "
            "launched again with resume; or launch it on Linux"
        )
