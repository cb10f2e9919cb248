"""Several actors of one GPU over NCCL: every check of a group, and every kind of run beside one process."""

from __future__ import annotations

import uuid

import pytest
import torch

import raypar as rp
from raypar.actors.specs.worlds import world_of
from tests.gpu.members import TIMEOUT, Member, demand_death_is_seen, group_classes, visible_gpus
from tests.gpu.shared_gpu import CHECKS, every_check, every_failing, every_run, run_of

SHARED = {"device": "cuda", "shared_gpu": "nccl"}


@pytest.fixture
def members(cluster):
    """``members(size)`` gives so many actors of one GPU, which have joined a group."""
    made = []

    def of(size):
        demand_fewer_gpus(size)
        actor = cluster.remote(num_cpus=1, num_gpus=1 / size, max_restarts=0)(Member)
        made.extend(joined := [actor.remote() for _ in range(size)])
        name = f"shared-{uuid.uuid4().hex}"
        classes = [one.join.remote(name, size, rank) for rank, one in enumerate(joined)]
        assert cluster.get(classes, timeout=2 * TIMEOUT) == ["NcclGroup"] * size
        return joined

    yield of
    for one in made:
        cluster.kill(one)


def demand_fewer_gpus(actors):
    """Skip a test in which each actor would have a GPU of its own."""
    if torch.cuda.device_count() >= actors:
        pytest.skip(f"needs fewer GPUs than its {actors} actors: set CUDA_VISIBLE_DEVICES=0")


def launched(run, **options):
    """A job whose actors share GPUs over NCCL."""
    demand_fewer_gpus(world_of(run).size)
    return rp.launch(run, **options)


@every_check
def test_a_group(cluster, members, check, size):
    cluster.get([one.call.remote(CHECKS[check]) for one in members(size)], timeout=2 * TIMEOUT)


def test_all_members_see_one_gpu_and_it_is_the_same(cluster, members):
    found = cluster.get([one.call.remote(visible_gpus) for one in members(2)], timeout=TIMEOUT)
    assert found[0] == found[1]
    shown, count, gpu = found[0]
    assert len(shown.split(",")) == count == 1
    assert gpu


@every_run
def test_a_run_trains_what_one_process_does(cluster, name):
    run = run_of(name, **SHARED)
    with launched(run) as job:
        classes = cluster.get([one.__ray_call__.remote(group_classes) for one in job._lifetime.actors.handles])
        assert {*map(tuple, classes)} <= {("NcclGroup",), ()}
        verdict = rp.verify(run, job)
    assert verdict.ok, str(verdict)


@every_failing
def test_an_actor_that_is_killed_ends_the_job_soon(cluster, name):
    with launched(run_of(name, **SHARED, timeout=30.0)) as job:
        demand_death_is_seen(job, cluster, 60)


def test_an_actor_that_is_killed_is_replaced(cluster):
    run = run_of("pp", **SHARED, max_failures=1)
    with launched(run) as job:
        undisturbed = [report.loss for report in job.train()]
    with launched(run, chaos=[rp.chaos.kill("pp=1", at="1B0", step=2)]) as job:
        assert [report.loss for report in job.train()] == undisturbed


@every_failing
def test_an_actor_that_fails_in_the_middle_of_a_step_ends_it_for_all(cluster, name):
    run = run_of(name, **SHARED)
    fault = rp.chaos.raise_(world_of(run).label(1), at="STEP", step=2)
    with launched(run, chaos=[fault]) as job, pytest.raises(rp.JobError, match="injected on purpose"):
        job.train()
