"""NCCL groups of actors that share one GPU: is every operation right, and how many bytes go through a second?

They are those of a run with ``shared_gpu="nccl"``. Their speed is that of sockets, and of kernels that take turns on
one GPU.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch

from raypar.actors.collective.group import Group
from tests.gpu.first_hour.outcome import Report
from tests.gpu.members import TIMEOUT, Member
from tests.gpu.shared_gpu import check_group

NBYTES = (64 << 10, 1 << 20, 16 << 20)  # of the whole tensor
SMALL_NBYTES = (64 << 10,)
_WARM_UP, _REPEATS = 2, 5


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
        report(group=ray.get(joined, timeout=2 * TIMEOUT)[0], doing="checking every operation")
        ops = ray.get([member.call.remote(check_group) for member in members], timeout=2 * TIMEOUT)[0]
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
            asked = [member.call.remote(seconds_of, op, nbytes) for member in members]
            seconds = max(ray.get(asked, timeout=TIMEOUT)[: len(taking)])
            found.setdefault(op, {})[str(nbytes)] = nbytes / seconds
            report(bytes_per_s=found)
