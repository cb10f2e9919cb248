"""The device of an actor: what it says of it to the other members of a group, and what they then talk over."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch._C._distributed_c10d import Store

from raypar.actors.transport import cupy_nccl, nccl

Backend = Literal["cpu", "nccl", "cupy", "staged"]


@dataclass(frozen=True)
class Capability:
    """What one member can do.

    gpu   the id of its GPU, the same in every process and container; "" for a CPU
    nccl  whether its torch talks over NCCL
    cupy  whether its cupy does
    """

    gpu: str
    nccl: bool
    cupy: bool


def capability(device: torch.device) -> Capability:
    """What this process can do with a device."""
    if device.type != "cuda":
        return Capability("", nccl=False, cupy=False)
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return Capability(gpu, nccl.is_available(), cupy_nccl.is_available())


def agree(store: Store, name: str, rank: int, size: int, own: Capability) -> Backend:
    """What the members of a group talk over: each tells the others what it can do, and all come to one result.

    Raises ValueError, at every member, if some have a GPU and some don't.
    """
    store.set(f"capability/{rank}", json.dumps(asdict(own)))
    everyone = [Capability(**json.loads(store.get(f"capability/{peer}"))) for peer in range(size)]
    return backend_for(name, everyone)


def backend_for(name: str, everyone: list[Capability]) -> Backend:
    """What members who can do this talk over, by rank."""
    without = [rank for rank, member in enumerate(everyone) if not member.gpu]
    if len(without) == len(everyone):
        return "cpu"
    if without:
        raise ValueError(
            f"group {name}: rank{'s' if len(without) > 1 else ''} {', '.join(map(str, without))} of {len(everyone)} "
            "have no GPU, the others do: give all of them one, or none"
        )
    if max(Counter(member.gpu for member in everyone).values()) > 1:
        return "staged"
    if all(member.nccl for member in everyone):
        return "nccl"
    return "cupy" if all(member.cupy for member in everyone) else "staged"
