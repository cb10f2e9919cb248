"""Connect a group: choose the backend by what its members have in common (CPUs or GPUs, one node or several)."""

from __future__ import annotations

import functools
import json
import logging
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch.distributed import PrefixStore, Store

from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.gloo.group import GlooGroup, create_device
from raypar.actors.collective.gloo.hierarchical import HierarchicalGroup
from raypar.actors.collective.gpu import cupy_nccl, nccl
from raypar.actors.collective.gpu.cupy_nccl import CupyGroup
from raypar.actors.collective.gpu.nccl import NcclGroup
from raypar.actors.collective.gpu.shared_gpu import shares_gpu
from raypar.actors.collective.gpu.staged import StagedGroup
from raypar.actors.collective.group import Group, GroupMember
from raypar.actors.collective.rendezvous import Introduction, introduce
from raypar.actors.collective.shm.group import ShmGroup

Backend = Literal["cpu", "nccl", "cupy", "staged"]


@dataclass(frozen=True)
class Capability:
    """What one member can communicate over.

    Attributes:
        gpu: Id of its GPU, the same in every process and container; "" for a CPU.
        nccl: Whether its torch supports NCCL.
        cupy: Whether its cupy supports NCCL.
        shares: Whether NCCL connects it to others on its GPU.
    """

    gpu: str
    nccl: bool
    cupy: bool
    shares: bool = False


def capability(device: torch.device) -> Capability:
    """Return what this process can communicate over with tensors on ``device``."""
    if device.type != "cuda":
        return Capability("", nccl=False, cupy=False)
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return Capability(gpu, nccl.has_torch_nccl(), cupy_nccl.has_cupy_nccl(), shares_gpu())


def backend_for(name: str, everyone: list[Capability], nodes: int = 1) -> Backend:
    """Choose the backend for members with given capabilities.

    Args:
        name: Name of the group, for messages.
        everyone: The members' capabilities in rank order.
        nodes: Number of nodes that they are on.

    Returns:
        "cpu" if no member has a GPU; "staged" (through the host) if some lack NCCL, or two are on a GPU that they do
        not share over NCCL, or those that do are on several nodes; otherwise "nccl" (torch's) where all have it, or
        "cupy".

    Raises:
        ValueError: Some members have a GPU and others do not.
    """
    without = [rank for rank, member in enumerate(everyone) if not member.gpu]
    if len(without) == len(everyone):
        return "cpu"
    if without:
        raise ValueError(
            f"group {name}: rank{'s' if len(without) > 1 else ''} {', '.join(map(str, without))} of {len(everyone)} "
            "have no GPU, the others do: give all of them one, or none"
        )
    if any(member.shares for member in everyone):  # their NCCL has the loopback interface only
        cannot = nodes > 1 or not all(member.shares for member in everyone)
    else:
        cannot = max(Counter(member.gpu for member in everyone).values()) > 1
    if cannot:
        return "staged"
    if all(member.nccl for member in everyone):
        return "nccl"
    return "cupy" if all(member.cupy for member in everyone) else "staged"


log = logging.getLogger(__name__)
_AXIS = "default"  # until the owner sets its own


def cpu_group(name: str, rank: int, size: int, store: Store, address: str) -> Group:
    """Connect a group for tensors on the host: over shared memory on one node, over Gloo between nodes, or over both.

    Args:
        name: Name of the group, for messages.
        rank: Rank of this member.
        size: Number of members.
        store: Where the members exchange addresses; its keys must be new.
        address: IP address of this node.

    Raises:
        GroupError: The members could not be connected.
    """
    member = GroupMember(name, _AXIS, rank, size)
    with closing(_introduced(member, store)) as peers:
        return _on_host(member, store, address, peers)


def gpu_group(
    name: str, rank: int, size: int, store: Store, address: str, device: torch.device, own: Capability
) -> Group:
    """Connect a group for tensors on GPUs, over the fastest backend that all members have; its ``host`` is a CPU group.

    See ``cpu_group`` for the other arguments and for errors.

    Args:
        device: This member's GPU.
        own: What this member can communicate over.
    """
    member = GroupMember(name, _AXIS, rank, size)
    with closing(_introduced(member, store, json.dumps(asdict(own)))) as peers:
        try:
            everyone = [Capability(**json.loads(extra)) for extra in peers.extras]
            backend = backend_for(name, everyone, len(peers.nodes))
        except ValueError as error:
            raise GroupError(name, "connect", None, str(error)) from error
        host = _on_host(member, PrefixStore("host", store), address, peers)
    log.info("group %s goes over %s", name, backend)
    if backend == "staged":
        return StagedGroup(host, device)
    kind = NcclGroup if backend == "nccl" else CupyGroup
    return kind(member, PrefixStore("gpu", store), device, host)


def _introduced(member: GroupMember, store: Store, extra: str = "") -> Introduction:
    """Introduce the members of a group to one another. Raises GroupError."""
    try:
        return introduce(store, member.rank, member.size, member.connect_timeout, extra)
    except (OSError, RuntimeError) as error:
        raise GroupError(member.name, "connect", None, str(error) or type(error).__name__) from error


def _on_host(member: GroupMember, store: Store, address: str, peers: Introduction) -> Group:
    """Connect the members for tensors on the host. See ``cpu_group``."""
    if len(peers.nodes) == 1:
        return ShmGroup(member, functools.partial(peers.connect, peers.nodes[0]))
    log.info("group %s: its members are on several nodes, so it goes over TCP", member.name)
    device = _gloo_device(address)
    if len(peers.nodes) < member.size:
        return HierarchicalGroup(member, store, device, nodes=peers.nodes, connect_node=peers.connect)
    return GlooGroup(member, store, device)


@functools.cache
def _gloo_device(address: str) -> Any:
    """Return the process's only Gloo device: all groups share its event loop and listener."""
    return create_device(address)
