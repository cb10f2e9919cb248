"""The device: whether torch, which need not be imported for that, is built for it.

Check what a run's actors take of their nodes against its other fields.
"""

from __future__ import annotations

from collections.abc import Iterator

from raypar.actors.machine.this_machine import torch_has_cuda
from raypar.actors.specs.types import DeviceChoice
from raypar.config.rules import Conflict, RunRule, RunSetting


def device_faults(choice: DeviceChoice) -> Iterator[str]:
    """Yield a fault if "cuda" is chosen and the torch that is installed here is built without CUDA."""
    if choice == "cuda" and torch_has_cuda() is False:
        yield "device is 'cuda', but torch is built without CUDA here: install a build with it"


RESOURCE_RULES: tuple[RunRule, ...] = (
    lambda examined: examined.run.resources.faults(),
    Conflict(
        RunSetting("resources.gpus", lambda gpus: gpus is not None),
        RunSetting("device", "cpu"),
        fix="leave one of them out",
    ),
)
