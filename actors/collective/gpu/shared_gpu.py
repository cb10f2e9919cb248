"""NCCL between several actors of one GPU: the environment variables with which it connects them.

NCCL refuses two members on one GPU of a host. With another ``NCCL_HOSTID`` each process is a host of its own, and NCCL
connects them by sockets of the loopback interface; NCCL 2.30 and newer have a variable that allows several members on
one GPU. The kernels of the members wait for one another on one GPU, where processes take turns, so an operation takes
milliseconds: this shows that groups and runs are right, and nothing about their speed.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping

import torch

from raypar.actors.collective.gpu.nccl import has_torch_nccl

_ALLOWED_SINCE = (2, 30)  # the first version of NCCL that has NCCL_MULTI_RANK_GPU_ENABLE
_MARK = "RAYPAR_SHARED_GPU"
_COMMON = {
    _MARK: "nccl",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MAX_CTAS": "1",  # a kernel that waits must leave room for those that it waits for
}


def shared_gpu_environment(version: tuple[int, ...]) -> Mapping[str, str]:
    """Return the environment variables with which NCCL connects a process to others on the same GPU.

    Args:
        version: The version of NCCL; () if it is not known.
    """
    if version >= _ALLOWED_SINCE:
        return {**_COMMON, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    # Not the rank: an actor gets another one in another layout, and NCCL reads the variable once in a process.
    return {**_COMMON, "NCCL_HOSTID": f"raypar-{uuid.uuid4().hex}"}


def allow_shared_gpu() -> None:
    """Let NCCL connect this process to others on the same GPU. Call it before the first communicator."""
    if not shares_gpu():
        os.environ.update(shared_gpu_environment(_nccl_version()))


def shares_gpu() -> bool:
    """Return whether NCCL connects this process to others on the same GPU, see ``allow_shared_gpu``."""
    return _MARK in os.environ


def _nccl_version() -> tuple[int, ...]:
    """Return the version of torch's NCCL; () without it."""
    found: tuple[int, ...] = torch.cuda.nccl.version() if has_torch_nccl() else ()
    return found
