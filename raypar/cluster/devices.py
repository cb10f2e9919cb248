"""What the actors of a run compute on, decided once: CPUs, a GPU each, or a part of one."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from raypar.actors.specs.types import DeviceChoice, DeviceKind
from raypar.errors import ConfigError

log = logging.getLogger(__name__)
_UNITS = 10_000  # Ray counts a GPU in so many


@dataclass(frozen=True)
class Share:
    """What every actor gets.

    device  what it computes on
    gpus    1, less if it shares a GPU, 0 on CPUs
    """

    device: DeviceKind
    gpus: float


def gpu_share(choice: DeviceChoice, actors: int, gpus: int, *, built: bool, grows: bool) -> Share:
    """The share of each of so many actors, and a line of the log about it.

    gpus   of the cluster
    built  whether torch is built for GPUs
    grows  whether the cluster may bring more nodes: then nobody shares

    Raises ConfigError where GPUs are demanded and there can't be any.
    """
    demand_build(choice, built=built)
    if choice == "cuda" and not gpus and not grows:
        raise ConfigError(
            ["device is 'cuda', but the cluster has no GPU: use device 'cpu', add a node with GPUs, or wait for nodes"]
        )
    if choice == "cpu" or (choice == "auto" and not (built and gpus >= actors)):
        why = f" ({_why(built)})" if choice == "auto" and gpus else ""
        log.info("computing on CPUs%s", why)
        return Share("cpu", 0.0)
    if gpus >= actors or grows:
        log.info("computing on GPUs, one for each actor")
        return Share("cuda", 1.0)
    sharing = math.ceil(actors / gpus)
    log.warning(
        "%d actors share %d GPU%s, up to %d one: their tensors go through the host, which is slow, for NCCL connects "
        "no two members on one GPU",
        actors,
        gpus,
        "s" if gpus > 1 else "",
        sharing,
    )
    return Share("cuda", _UNITS // sharing / _UNITS)


def demand_build(choice: DeviceChoice, *, built: bool) -> None:
    """Raise ConfigError if a GPU is demanded of a torch without them; asked before Ray is started, too."""
    if choice == "cuda" and not built:
        raise ConfigError(["device is 'cuda', but torch is built without CUDA here: install a build with it"])


def _why(built: bool) -> str:
    """Why there are GPUs and they are not used."""
    return "GPUs are fewer than actors: device 'cuda' would share them" if built else "torch has no CUDA here"
