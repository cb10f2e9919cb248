"""Check that this system has the device, the resources and the features that a run needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from raypar.actors.machine.system_features import REQUIREMENTS, Feature
from raypar.actors.machine.this_machine import lacks_device
from raypar.actors.specs.types import DeviceChoice
from raypar.actors.specs.worlds import world_of
from raypar.config.rules import Conflict, Examined, RunRule, RunSetting

_NEEDS: tuple[Feature, ...] = ("memory_files", "process_handles")  # for snapshots; to end an actor that hangs


def device_faults(choice: DeviceChoice) -> Iterator[str]:
    """Yield a fault if "cuda" is chosen and the torch that is installed here is built without CUDA."""
    if lacks_device(choice):
        yield "device is 'cuda', but torch is built without CUDA here: install a build with it"


_NCCL = RunSetting("shared_gpu", "nccl")
_NO_SHARING = "leave shared_gpu out"
_AUTO = RunSetting(
    "run",
    lambda run: run.device == "auto" and run.resources.gpus is None,
    "device is 'auto', which shares no GPU",
)


def _one_actor(examined: Examined) -> Iterator[str]:
    """Yield a fault if a run of one actor is to share its GPU over NCCL."""
    examined.demand("shared_gpu", "mesh", "data_parallel", "servers", "zero", "offload")
    if _NCCL.is_in(examined) and world_of(examined.run).size == 1:
        yield f"shared_gpu is 'nccl', but the run has one actor, which shares its GPU with none: {_NO_SHARING}"


RESOURCE_RULES: tuple[RunRule, ...] = (
    lambda examined: examined.run.resources.faults(),
    Conflict(
        RunSetting("resources.gpus", lambda gpus: gpus is not None),
        RunSetting("device", "cpu"),
        fix="leave one of them out",
    ),
    _one_actor,
    Conflict(_NCCL, RunSetting("device", "cpu"), fix=f"set device to 'cuda', or {_NO_SHARING}"),
    Conflict(_NCCL, _AUTO, fix=f"set device to 'cuda', or {_NO_SHARING}"),
    Conflict(
        _NCCL,
        RunSetting("resources.gpus", lambda gpus: gpus is not None and gpus > 0.5),
        because="but {other}, so that no two actors are on one GPU",
        fix=f"set resources.gpus to 0.5 or less, or {_NO_SHARING}",
    ),
    Conflict(
        _NCCL,
        RunSetting("resources.placement_strategy", lambda strategy: strategy in ("SPREAD", "STRICT_SPREAD")),
        because="but {other}, and NCCL connects actors of one GPU on one node only",
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
