"""Members of a group as actors that share one GPU; on CPUs raypar's CPU group in place of NCCL."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import raypar as rp
from raypar.actors.collective.group import Group

TIMEOUT = 60.0  # seconds: of a wait in the group, and of a call to an actor


class Member:
    """One actor: a member of the group."""

    def join(self, name: str, size: int, rank: int) -> str:
        """Join the group, and return the name of its class: NCCL's, or on CPUs the one that raypar uses there."""
        from raypar.actors.collective.gpu.group import ring
        from raypar.actors.collective.gpu.shared_gpu import allow_shared_gpu
        from raypar.actors.collective.ray import ray_groups

        device = torch.device("cpu")
        if torch.cuda.is_available():
            allow_shared_gpu()
            device = torch.device("cuda", 0)  # of those that Ray shows this actor
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)
        self._group = ray_groups.join(name, "dp", size, rank, TIMEOUT, device=device)
        self._group.connect(ring(size))
        return type(self._group).__name__

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function of the group and of further arguments returns."""
        return function(self._group, *args)

    def leave(self) -> None:
        """End the group."""
        self._group.abort()


def visible_gpus(group: Group) -> tuple[str, int, str]:
    """Return the GPUs that this process sees, their number, and the id of the group's GPU."""
    from raypar.actors.collective.connect import capability

    return os.environ.get("CUDA_VISIBLE_DEVICES", ""), torch.cuda.device_count(), capability(group.device).gpu


def group_classes(actor: Any) -> list[str]:
    """Return the names of the classes of an actor's groups; ``actor`` is its instance."""
    return sorted({type(group).__name__ for group in actor._joined.values()})


def demand_death_is_seen(job: rp.Job, cluster: Any, seconds: float) -> None:
    """Take a step, kill the second actor of a job, and assert that the next step fails within so many seconds."""
    job.step()
    cluster.kill(job._loop.loaded.handles[1])
    start = time.monotonic()
    with pytest.raises(rp.JobError, match="died"):
        job.step()
    assert time.monotonic() - start < seconds
