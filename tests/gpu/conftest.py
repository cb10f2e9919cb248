"""Everything here needs an NVIDIA GPU, some of it two: marked ``gpu``, and skipped where there is none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from raypar.actors.collective.gpu import cupy_nccl, nccl
from raypar.actors.collective.gpu.group import ring
from raypar.actors.collective.group import GroupMember
from tests.gpu.ops import together

HERE = Path(__file__).parent
CLASSES = {"nccl": (nccl.NcclGroup, nccl.has_torch_nccl), "cupy": (cupy_nccl.CupyGroup, cupy_nccl.has_cupy_nccl)}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(params=CLASSES)
def make(request):
    """``make(size, timeout)`` gives the members of a group by rank, each a thread's with a GPU of its own."""
    cls, is_available = CLASSES[request.param]
    if not is_available():
        pytest.skip(f"{request.param} is not installed")
    made = []

    def groups(size, timeout=60.0, edges=None):
        if torch.cuda.device_count() < size:
            pytest.skip(f"needs {size} GPUs")
        store, name = dist.HashStore(), f"gpu@{time.monotonic_ns()}"

        def member(rank):
            group = cls(GroupMember(name, "x", rank, size, timeout), store, torch.device("cuda", rank))
            group.connect(ring(size) if edges is None else edges)
            return group

        members = together(size, member)
        made.extend(members)
        return members

    yield groups
    for group in made:
        group.abort()
