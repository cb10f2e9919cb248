"""The environment variables with which NCCL connects several actors of one GPU, and where they are set."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

import raypar as rp
from raypar.actors.collective.connect import Capability, backend_for
from raypar.actors.collective.gpu import shared_gpu
from raypar.actors.collective.gpu.shared_gpu import allow_shared_gpu, shared_gpu_environment, shares_gpu
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.worker import actor
from raypar.config.run import check_run
from raypar.job.start.actor_plans import plans_of
from tests.support.team import Local

OLD, NEW = (2, 28, 9), (2, 30, 0)
SHARES = Capability("GPU-1", nccl=True, cupy=False, shares=True)


@pytest.fixture(autouse=True)
def environment_as_before(monkeypatch):
    """What a test sets is gone after it."""
    for name in {**shared_gpu_environment(OLD), **shared_gpu_environment(NEW)}:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("version", [OLD, NEW, ()])
def test_nccl_goes_over_sockets_of_the_loopback_interface_and_leaves_room_for_others(version):
    sockets = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MAX_CTAS": "1"}
    assert sockets.items() <= shared_gpu_environment(version).items()


def test_each_process_is_a_host_of_its_own_before_nccl_2_30_which_allows_several_on_one_gpu():
    for version in (OLD, ()):
        found = [shared_gpu_environment(version) for _ in range(2)]
        assert len({one["NCCL_HOSTID"] for one in found}) == 2
        assert "NCCL_MULTI_RANK_GPU_ENABLE" not in found[0]
    assert shared_gpu_environment(NEW)["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_HOSTID" not in shared_gpu_environment(NEW)


def test_a_process_keeps_its_variables_which_nccl_reads_once(monkeypatch):
    monkeypatch.setattr(shared_gpu, "has_torch_nccl", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: OLD)
    assert not shares_gpu()
    allow_shared_gpu()
    host = os.environ["NCCL_HOSTID"]
    allow_shared_gpu()
    assert shares_gpu()
    assert os.environ["NCCL_HOSTID"] == host


@pytest.mark.parametrize(
    ("members", "nodes", "backend"),
    [
        ([SHARES, SHARES], 1, "nccl"),
        ([SHARES, Capability("GPU-2", nccl=True, cupy=False, shares=True)], 1, "nccl"),
        ([Capability("GPU-1", nccl=False, cupy=True, shares=True)] * 2, 1, "cupy"),
        ([Capability("GPU-1", nccl=False, cupy=False, shares=True)] * 2, 1, "staged"),
        ([SHARES, Capability("GPU-1", nccl=True, cupy=False)], 1, "staged"),
        ([SHARES, Capability("GPU-2", nccl=True, cupy=False, shares=True)], 2, "staged"),
    ],
)
def test_members_that_share_a_gpu_over_nccl_are_on_one_node_and_all_share(members, nodes, backend):
    """One that replaces another may be on another node, to which the loopback interface does not lead."""
    assert backend_for("x", members, nodes) == backend


@pytest.mark.parametrize(
    ("how", "device", "shares"), [("nccl", "cuda", True), ("staged", "cuda", False), ("nccl", "cpu", False)]
)
def test_an_actor_sets_them_before_it_joins_its_first_group(monkeypatch, how, device, shares):
    run = rp.recipe("gpt-tiny", mesh=rp.Mesh(dp=2))
    plan = plans_of(replace(run, shared_gpu=how), check_run(run), "job", device=device)[0]
    seen = []

    class StopError(Exception):
        pass

    def join(*_):
        seen.append(shares_gpu())
        raise StopError

    gpu = ComputeDevice()
    gpu.kind = device
    monkeypatch.setattr(actor, "device_of", lambda kind: gpu)
    monkeypatch.setattr(actor.ray_groups, "join", join)
    with pytest.raises(StopError):
        Local().start(plan)
    assert seen == [shares]
