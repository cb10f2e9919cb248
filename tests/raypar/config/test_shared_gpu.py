"""Actors that share a GPU over NCCL: what does not go with it, and where it may change."""

from __future__ import annotations

from dataclasses import replace

import pytest

import raypar as rp
from raypar.actors.specs.worlds import world_of
from raypar.cli.plan.planning import _on
from raypar.config.conflicts.system import RESOURCE_RULES
from raypar.config.rules import Examined, faults_by
from raypar.config.run import check_run, reset_faults
from raypar.job.layout.elastic import with_replicas
from raypar.planner.hardware.cluster_file import cluster_of
from raypar.reporting.summary import plan_rows

RUN = rp.recipe("gpt-tiny", mesh=rp.Mesh(pp=2), device="cuda", shared_gpu="nccl")
DEVICE = "set device to 'cuda', or leave shared_gpu out"


def faults(**changes):
    """What the rules of devices and resources find; that this machine's torch may lack CUDA is another matter."""
    run = replace(RUN, **changes)
    return [*faults_by(RESOURCE_RULES, Examined(run, lambda *_: True, whole=None))]


def test_actors_of_a_gpu_may_share_it_over_nccl():
    assert faults() == []
    assert faults(resources=rp.Resources(gpus=0.5)) == []
    assert faults(device="auto", resources=rp.Resources(gpus=0.25)) == []
    assert rp.Run().shared_gpu == "staged"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device": "cpu"}, f"device is 'cpu': {DEVICE}"),
        ({"device": "auto"}, f"device is 'auto', which shares no GPU: {DEVICE}"),
        ({"mesh": rp.Mesh()}, "the run has one actor, which shares its GPU with none: leave shared_gpu out"),
        (
            {"resources": rp.Resources(gpus=1.0)},
            "resources.gpus is 1, so that no two actors are on one GPU: set resources.gpus to 0.5 or less, or leave "
            "shared_gpu out",
        ),
        (
            {"resources": rp.Resources(placement_strategy="STRICT_SPREAD")},
            "resources.placement_strategy is 'STRICT_SPREAD', and NCCL connects actors of one GPU on one node only: "
            "leave shared_gpu out, or leave resources.placement_strategy out",
        ),
    ],
)
def test_what_shares_no_gpu_or_needs_several_nodes_is_refused_with_its_fix(changes, says):
    assert faults(**changes) == [f"shared_gpu is 'nccl', but {says}"]
    assert faults(**changes, shared_gpu="staged") == []


def test_all_faults_come_at_once():
    run = replace(RUN, device="cpu", mesh=rp.Mesh(), resources=rp.Resources(placement_strategy="SPREAD"), clip=-1.0)
    found = rp.faults(run)
    assert len(found) == 4, found
    (fault,) = rp.faults(replace(RUN, device="cpu", shared_gpu="shm"))
    assert fault == "shared_gpu is 'shm': it must be 'staged' or 'nccl'"


def test_actors_that_stay_keep_how_they_share():
    (fault,) = reset_faults(replace(RUN, shared_gpu="staged"), "cuda", RUN)
    assert fault == (
        "reset keeps the actors, whose NCCL is set up once: shared_gpu must stay 'nccl'; launch anew for 'staged'"
    )
    assert not [*reset_faults(RUN, "cuda", RUN)]


def test_one_actor_that_is_left_shares_with_none():
    two = with_replicas(replace(RUN, mesh=rp.Mesh(dp=4)), 2)
    assert (two.shared_gpu, with_replicas(two, 1).shared_gpu) == ("nccl", "staged")
    assert with_replicas(replace(RUN, mesh=rp.Mesh(dp=2, pp=2)), 1).shared_gpu == "nccl"


def test_a_plan_for_other_machines_gives_each_actor_a_gpu():
    assert _on(RUN, cluster_of(8, "h100").cluster, is_given=False).shared_gpu == "staged"


def test_the_plan_says_how_actors_of_one_gpu_exchange_tensors():
    on_cpus = replace(RUN, device="cpu", shared_gpu="staged")
    schedule = check_run(on_cpus)["train"]
    assert world_of(RUN).size == 2
    assert "actors of one GPU" not in dict(plan_rows(on_cpus, schedule))
    assert dict(plan_rows(RUN, schedule))["actors of one GPU"] == (
        "exchange tensors over NCCL, whose kernels take turns: for trying, and slower than predicted"
    )
