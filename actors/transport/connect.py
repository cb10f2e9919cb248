"""Connecting a group: over what its members have in common, CPUs or GPUs, one node or several."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from raypar.actors.group import Group, GroupError
from raypar.actors.transport.cupy_nccl import CupyGroup
from raypar.actors.transport.device import Capability, agree
from raypar.actors.transport.gloo import GlooGroup, create_device
from raypar.actors.transport.links import same_place
from raypar.actors.transport.nccl import NcclGroup
from raypar.actors.transport.shm import ShmGroup
from raypar.actors.transport.staged import StagedGroup

log = logging.getLogger(__name__)
TIMEOUT = 60.0  # seconds for every member to come; also those of a wait, until its owner has another wish
_AXIS = "default"  # likewise


def cpu_group(name: str, rank: int, size: int, store: Store, address: str) -> Group:
    """A group for tensors on the host; ``address`` is this node's own. Raises GroupError."""
    try:
        together = same_place(store, rank, size)
    except (OSError, RuntimeError) as error:
        raise GroupError(name, "connect", None, str(error) or type(error).__name__) from error
    if together:
        return ShmGroup(name, _AXIS, rank, size, TIMEOUT, store=store, connect_timeout=TIMEOUT)
    log.info("group %s: its members are on several nodes, so it goes over TCP", name)
    device = _gloo_device(address)
    return GlooGroup(name, _AXIS, rank, size, TIMEOUT, store=store, device=device, connect_timeout=TIMEOUT)


def gpu_group(
    name: str, rank: int, size: int, store: Store, address: str, device: torch.device, own: Capability
) -> Group:
    """A group for tensors on ``device``, over the fastest that every member has; a CPU group is beside it.

    own  what this member can do

    Raises GroupError.
    """
    try:
        backend = agree(store, name, rank, size, own)
    except (OSError, RuntimeError, ValueError) as error:
        raise GroupError(name, "connect", None, str(error) or type(error).__name__) from error
    host = cpu_group(name, rank, size, PrefixStore("host", store), address)
    log.info("group %s goes over %s", name, backend)
    if backend == "staged":
        return StagedGroup(host, device)
    kind = NcclGroup if backend == "nccl" else CupyGroup
    below = PrefixStore("gpu", store)
    return kind(name, _AXIS, rank, size, TIMEOUT, store=below, device=device, host=host, connect_timeout=TIMEOUT)


@functools.cache
def _gloo_device(address: str) -> Any:
    """One Gloo device a process: every group shares its event loop and listener."""
    return create_device(address)
