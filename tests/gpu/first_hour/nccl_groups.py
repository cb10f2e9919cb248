"""NCCL groups of actors that share one GPU: is every operation right, and how many bytes go through a second?

NCCL refuses two members on one GPU of a host. Members that give themselves different hosts (``NCCL_HOSTID``) are
connected over sockets of the loopback interface. raypar itself goes through the host's memory then (``backend_for``),
so the groups are made here, of the same class that it uses where each actor has a GPU of its own. Their speed is that
of sockets, and of kernels that take turns on one GPU.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch

from raypar.actors.collective.group import Group, GroupMember
from tests.gpu.first_hour.outcome import Report
from tests.gpu.ops import check_every_op, check_nothing, check_order

NBYTES = (64 << 10, 1 << 20, 16 << 20)  # of the whole tensor
SMALL_NBYTES = (64 << 10,)
_TIMEOUT = 60.0  # seconds: of a wait in the group, and of a call to an actor
_WARM_UP, _REPEATS = 2, 5
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def one_gpu_environment(member: int) -> dict[str, str]:
    """Return the variables with which NCCL connects a member to others on the same GPU.

    Args:
        member: A number that no other member on this machine has.
    """
    return {
        "NCCL_HOSTID": f"raypar-first-hour-{member}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def check_group(group: Group) -> list[str]:
    """Take every operation of a group to its end and compare what it gives, in several dtypes; return their names.

    All members call it. Raises AssertionError if a result is wrong.
    """
    for dtype in _DTYPES:
        check_every_op(group, dtype, group.device)
    check_nothing(group, group.device)
    check_order(group, group.device)
    group.synchronize()
    return sorted({op for _, op in group.ledger.entries()})


def seconds_of(group: Group, op: str, nbytes: int) -> float:
    """Return the seconds of an operation: the mean of some in a row, until they are complete. All members call it.

    Args:
        group: The group.
        op: Name of the operation, see ``tests.bench.group_speed.OPS``.
        nbytes: Bytes of the whole tensor.
    """
    from tests.bench.group_speed import OPS, buffers

    held = buffers(nbytes, group)
    for number in range(_WARM_UP):
        OPS[op](group, held, number)
    group.barrier().wait()
    start = time.perf_counter()
    for number in range(_REPEATS):
        OPS[op](group, held, number)
    group.synchronize()
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    seconds = (time.perf_counter() - start) / _REPEATS
    return seconds / 2 if op == "p2p" else seconds


class Member:
    """One actor: a member of the group."""

    def join(self, name: str, size: int, rank: int) -> str:
        """Join the group, and return the name of its class: NCCL's, or on CPUs the one that raypar uses there."""
        from raypar.actors.collective.connect import cpu_group
        from raypar.actors.collective.gpu.group import ring
        from raypar.actors.collective.gpu.nccl import NcclGroup
        from raypar.actors.collective.ray import ray_groups

        store = ray_groups.KVStore(name)
        self._group: Group
        if torch.cuda.is_available():
            os.environ.update(one_gpu_environment(rank))  # before NCCL is first used in this process
            device = torch.device("cuda", 0)  # of those that Ray shows this actor
            torch.cuda.set_device(device)
            self._group = NcclGroup(GroupMember(name, "dp", rank, size, _TIMEOUT), store, device)
            self._group.connect(ring(size))
        else:
            torch.set_num_threads(1)
            self._group = cpu_group(name, rank, size, store, ray_groups.node_address())
        return type(self._group).__name__

    def check(self) -> list[str]:
        """See ``check_group``."""
        return check_group(self._group)

    def seconds(self, op: str, nbytes: int) -> float:
        """See ``seconds_of``."""
        return seconds_of(self._group, op, nbytes)


def measure_group(size: int, small: bool, report: Report) -> None:
    """Measure a group of so many actors, each with a part of one GPU; without a GPU Ray only counts as if it had one.

    Args:
        size: Number of members.
        small: Whether the operations are measured at one size only.
        report: Takes the figures.
    """
    from tests.gpu.first_hour.outcome import NotPossibleError

    try:
        import ray

        from tests.bench.local_ray import local_ray, quiet
    except ImportError as error:
        raise NotPossibleError(f"Ray is not here: {error}") from error
    quiet()
    report(doing="starting Ray")
    if not torch.cuda.is_available():
        report(note="no NCCL here: raypar's CPU group in its place")
    with local_ray(num_gpus=1):
        name = f"first-hour-{uuid.uuid4().hex[:8]}"
        actor: Any = ray.remote(num_cpus=1, num_gpus=1 / size, max_restarts=0)(Member)
        members = [actor.remote() for _ in range(size)]
        report(doing="connecting")
        joined = [member.join.remote(name, size, rank) for rank, member in enumerate(members)]
        report(group=ray.get(joined, timeout=2 * _TIMEOUT)[0], doing="checking every operation")
        ops = ray.get([member.check.remote() for member in members], timeout=2 * _TIMEOUT)[0]
        report(ops=ops, right=True)
        _report_speed(members, SMALL_NBYTES if small else NBYTES, report)


def _report_speed(members: Sequence[Any], sizes: Sequence[int], report: Report) -> None:
    """Report the bytes a second of each operation: those of the whole tensor over the time of the slowest member."""
    import ray

    from tests.bench.group_speed import OPS

    found: dict[str, dict[str, float]] = {}
    for nbytes in sizes:
        for op in OPS:
            report(doing=f"{op} of {nbytes} bytes")
            taking = members[:2] if op == "p2p" else members
            asked = [member.seconds.remote(op, nbytes) for member in members]
            seconds = max(ray.get(asked, timeout=_TIMEOUT)[: len(taking)])
            found.setdefault(op, {})[str(nbytes)] = nbytes / seconds
            report(bytes_per_s=found)
