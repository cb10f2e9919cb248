"""What the members of a group talk over."""

from __future__ import annotations

import pytest
import torch

from raypar.actors.collective.connect import Capability, backend_for, capability


def gpus(*ids, nccl=True, cupy=True):
    return [Capability(gpu, nccl, cupy) for gpu in ids]


@pytest.mark.parametrize(
    ("members", "backend"),
    [
        (gpus("", ""), "cpu"),
        (gpus("a", "b"), "nccl"),
        (gpus("a", "b", nccl=False), "cupy"),
        ([*gpus("a"), *gpus("b", nccl=False)], "cupy"),
        (gpus("a", "b", nccl=False, cupy=False), "staged"),
        (gpus("a", "b", "a"), "staged"),
    ],
)
def test_the_fastest_that_all_have(members, backend):
    assert backend_for("x", members) == backend


def test_members_with_and_without_a_gpu_are_named():
    with pytest.raises(ValueError, match="group dp: ranks 1, 2 of 4 have no GPU"):
        backend_for("dp", gpus("a", "", "", "b"))


def test_a_cpu_has_nothing_to_say():
    assert capability(torch.device("cpu")) == Capability("", nccl=False, cupy=False)
