"""The device: whether torch, which need not be imported for that, is built for it.

Check what a run's actors take of their nodes against its other fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceChoice
from raypar.planner.hardware.this_machine import torch_has_cuda


def device_faults(choice: DeviceChoice) -> Iterator[str]:
    """Yield a fault if "cuda" is chosen and the torch that is installed here is built without CUDA."""
    if choice == "cuda" and torch_has_cuda() is False:
        yield "device is 'cuda', but torch is built without CUDA here: install a build with it"


def resource_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield what is wrong with a run's resources, each with its fix.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
    """
    if right("resources"):
        yield from run.resources.faults()
    if right("resources", "device") and run.resources.gpus is not None and run.device == "cpu":
        yield f"resources.gpus is {run.resources.gpus:g}, but device is 'cpu': leave one of them out"
