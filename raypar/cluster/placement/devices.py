"""The choice of device for a run's actors: CPUs, one GPU for each actor, or a part of a GPU."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from raypar.actors.specs.resources import Resources
from raypar.actors.specs.types import DeviceChoice, DeviceKind, SharedGpu
from raypar.errors import ConfigError
from raypar.log_details import DETAIL

log = logging.getLogger(__name__)
_NO_GPU = "use device 'cpu', add a node with GPUs, or wait for nodes"
_UNITS = 10_000  # the units in which Ray counts fractions of a GPU
_EXCHANGED: Mapping[SharedGpu, str] = {
    "staged": "their tensors go through the host, which is slow (shared_gpu 'nccl': over NCCL, for trying)",
    "nccl": "NCCL connects them, and their kernels take turns, which is for trying, not for speed",
}


@dataclass(frozen=True)
class ActorResources:
    """The compute resources of every actor.

    Attributes:
        device: The kind of device.
        gpus: Number of GPUs: 1, a fraction if actors share a GPU, 0 on CPUs.
        cpus: Number of CPUs.
        others: Amounts of other resources, by Ray's names; memory in bytes.
        labels: The required labels of a node, in Ray's syntax.
    """

    device: DeviceKind
    gpus: float
    cpus: float = 1.0
    others: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


def share_of(
    choice: DeviceChoice,
    resources: Resources,
    actors: int,
    gpus: int,
    *,
    built: bool,
    grows: bool,
    shared_gpu: SharedGpu = "staged",
) -> ActorResources:
    """Return the resources of each actor of a run; see ``gpu_share``.

    Args:
        choice: The run's device.
        resources: The run's resources.
        actors: Number of actors.
        gpus: Number of GPUs of the cluster.
        built: Whether torch is built with CUDA.
        grows: Whether the cluster may add nodes.
        shared_gpu: How actors of one GPU exchange tensors.

    Raises:
        ConfigError: The run demands GPUs, and there can be none, or it shares them over NCCL, and none is shared.
    """
    if resources.gpus is None:
        device = gpu_share(choice, actors, gpus, built=built, grows=grows, shared_gpu=shared_gpu)
    else:
        demand_build("cuda", built=built)
        if not gpus and not grows:
            raise ConfigError([f"resources.gpus is {resources.gpus:g}, but the cluster has no GPU: {_NO_GPU}"])
        log.info("computing on GPUs, %g for each actor", resources.gpus, extra=DETAIL)
        device = ActorResources("cuda", resources.gpus)
    return replace(device, cpus=resources.cpus, others=resources.others, labels=dict(resources.labels))


def gpu_share(
    choice: DeviceChoice,
    actors: int,
    gpus: int,
    *,
    built: bool,
    grows: bool,
    shared_gpu: SharedGpu = "staged",
) -> ActorResources:
    """Choose the resources of each actor, and log the choice.

    Args:
        choice: The run's setting: "auto", "cpu" or "cuda".
        actors: Number of actors.
        gpus: Number of GPUs of the cluster.
        built: Whether torch is built with CUDA.
        grows: Whether the cluster may add nodes; then actors do not share GPUs.
        shared_gpu: How actors of one GPU exchange tensors.

    Returns:
        The share of each actor.

    Raises:
        ConfigError: If "cuda" is chosen and there can be no GPU, or GPUs are to be shared over NCCL and none is shared.
    """
    demand_build(choice, built=built)
    if choice == "cuda" and not gpus and not grows:
        raise ConfigError([f"device is 'cuda', but the cluster has no GPU: {_NO_GPU}"])
    if choice == "cpu" or (choice == "auto" and not (built and gpus >= actors)):
        why = f" ({_why(built)})" if choice == "auto" and gpus else ""
        log.info("computing on CPUs%s", why, extra=None if why else DETAIL)
        return ActorResources("cpu", 0.0)
    if gpus >= actors or grows:
        if shared_gpu == "nccl":
            why = ", as none is shared with wait_for_nodes" if gpus < actors else ""
            text = f"shared_gpu is 'nccl', but each actor gets a GPU of its own{why}"
            raise ConfigError([f"{text}: leave shared_gpu out"])
        log.info("computing on GPUs, one for each actor", extra=DETAIL)
        return ActorResources("cuda", 1.0)
    sharing = math.ceil(actors / gpus)
    log.warning(
        "%d actors share %d GPU%s, up to %d one: %s",
        actors,
        gpus,
        "s" if gpus > 1 else "",
        sharing,
        _EXCHANGED[shared_gpu],
    )
    return ActorResources("cuda", part_of_gpu(sharing))


def part_of_gpu(actors: int) -> float:
    """Return the part of a GPU of each of some actors that share it, in Ray's units."""
    return _UNITS // actors / _UNITS


def demand_build(choice: DeviceChoice, *, built: bool) -> None:
    """Raise ConfigError if "cuda" is chosen and torch is built without CUDA. Also called before Ray is started."""
    if choice == "cuda" and not built:
        raise ConfigError(["device is 'cuda', but torch is built without CUDA here: install a build with it"])


def _why(built: bool) -> str:
    """Return the reason why the cluster's GPUs are not used."""
    return "GPUs are fewer than actors: device 'cuda' would share them" if built else "torch has no CUDA here"
