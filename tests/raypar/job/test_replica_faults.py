"""Replicas and parameter servers that go wrong: what is said, and how soon."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.config.run import world_of
from raypar.planner.host import num_slots

SERVED = {"data_parallel": "parameter_server"}

pytestmark = pytest.mark.usefixtures("by_value")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"mesh": rp.Mesh(dp=17)},
            r"mesh: 17 actors need 17 CPUs, the cluster has 16 \(\d+ free\) on 1 node: use a smaller",
        ),
        ({"mesh": rp.Mesh(dp=16)} | SERVED, r"mesh: 17 actors \(1 of them servers\) need 17 CPUs, the cluster has 16"),
    ],
)
def test_a_world_that_the_cluster_has_no_room_for(cluster, changes, says):
    with pytest.raises(rp.ConfigError, match=says):
        rp.launch(small(lambda: [nn.Linear(4, 4)], **changes))


class Trouble(nn.Module):
    """A linear layer that sleeps before each forward, and may draw its weights elsewhere."""

    def __init__(self, sleep=0.0, value=None):
        super().__init__()
        self.inner, self.sleep = nn.Linear(4, 4), sleep
        if value is not None:
            self.inner.weight.data.fill_(value)

    def forward(self, x):
        time.sleep(self.sleep)
        return self.inner(x)


def batch(step, microbatch, dp):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + 10 * microbatch + dp))
    return x, x.sin()


def small(fn, **changes):
    fields = {
        "mesh": rp.Mesh(dp=2),
        "data": rp.Batches(batch),
        "microbatches": 2,
        "optim": rp.SGD(lr=0.1),
        "steps": 5,
        "timeout": 60.0,
    }
    return rp.Run(model=rp.Layers(fn, nn.functional.mse_loss), **(fields | changes))


def pids(job):
    from raypar.cluster.calls import ray

    def pid(actor):
        return os.getpid()

    return ray.get([handle.__ray_call__.remote(pid) for handle in job._loop.loaded.handles])


def test_a_server_may_wait_longer_than_an_actor(job_of):
    """It waits for the replicas' whole step, of which each action is short enough."""
    job = job_of(small(lambda: [Trouble(sleep=0.4)], microbatches=4, timeout=1.0, **SERVED))
    assert job.step().step == 0


def poisoned(step, microbatch, dp):
    x, y = batch(step, microbatch, dp)
    return x, y * float("inf") if (step, microbatch, dp) == (1, 1, 1) else y


@pytest.mark.parametrize("mode", ["parameter_server", "all_reduce"])
def test_a_loss_that_is_not_finite_on_one_replica_changes_nothing_and_the_job_goes_on(job_of, mode):
    job = job_of(small(lambda: [nn.Linear(4, 4)], data=rp.Batches(poisoned), data_parallel=mode))
    job.step()
    before = dict(job.weights())
    with pytest.raises(rp.NonFiniteError, match=r"step 2: the loss is not finite, nor are the gradients of"):
        job.step()
    for dp in range(2):
        assert all(torch.equal(weight, before[name]) for name, weight in job.weights(dp).items())
    job.next_step = 2  # past the bad batch
    job.step()
    assert not torch.equal(job.param("layers.0.weight"), before["layers.0.weight"])


def test_replicas_that_begin_unequal_are_named(kept_actors):
    with rp.launch(small(lambda: [nn.Linear(4, 4)])) as job:
        with pytest.raises(rp.JobError, match="the weights of pp=0 dp=1 are not those of pp=0 dp=0"):
            job.reset(small(lambda: [Trouble(value=float(os.getpid()))]))
        with pytest.raises(rp.JobError, match="this job is over"):
            job.step()


@pytest.mark.parametrize(("replicas", "victim", "name"), [(2, 0, "pp=0 dp=0"), (1, 1, "server 0 of pp=0")])
def test_a_killed_replica_or_server_is_named_within_seconds(job_of, replicas, victim, name):
    job = job_of(small(lambda: [Trouble(sleep=0.4)], mesh=rp.Mesh(dp=replicas), **SERVED))
    actors = pids(job)
    threading.Timer(0.4, lambda: os.kill(actors[victim], signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(rp.ActorDiedError, match=rf"actor {name} died during step"):
        job.train()
    assert time.monotonic() - start < 8


def test_a_stopped_server_is_named(job_of):
    job = job_of(small(lambda: [Trouble()], mesh=rp.Mesh(), timeout=1.0, **SERVED))
    job.step()
    (server,) = pids(job)[1:]
    os.kill(server, signal.SIGSTOP)
    try:
        with pytest.raises(rp.JobError, match="server 0 of pp=0"):
            job.train()
    finally:
        job.close()


def test_a_stopped_replica_is_named_by_who_waits_for_it_and_by_the_driver(job_of):
    job = job_of(small(lambda: [Trouble(sleep=0.2)], timeout=1.0))
    victim = pids(job)[1]
    threading.Timer(0.1, lambda: os.kill(victim, signal.SIGSTOP)).start()
    try:
        with pytest.raises(
            rp.StalledError, match=r"actor pp=0 dp=1 gives no answer.* seen from the others: .*pp=0 dp=0"
        ):
            job.train()
    finally:
        job.close()


class Mixture(nn.Module):
    """Two experts that sleep; every token goes to both. Whoever is done first waits in an all-to-all for the other."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Trouble(sleep=0.3) for _ in range(2))

    def forward(self, x):
        chosen = torch.tensor([[0, 1]]).expand(len(x), 2)
        return rp.run_experts(x, self.experts, chosen, x[:, :2].sigmoid())


def mixture(timeout):
    model = rp.Layers(lambda: [Mixture()], nn.functional.mse_loss, plan={"layers.*.experts": "expert"})
    run = small(list, mesh=rp.Mesh(dp=2, ep=2), timeout=timeout)
    return rp.Run(**{name: getattr(run, name) for name in ("mesh", "data", "optim", "steps", "timeout")}, model=model)


def test_an_actor_that_is_killed_while_tokens_travel_is_named_within_seconds(job_of):
    job = job_of(mixture(timeout=60.0))
    victim = pids(job)[1]
    threading.Timer(0.5, lambda: os.kill(victim, signal.SIGKILL)).start()
    start = time.monotonic()
    named = r"actor pp=0 dp=1 died during step.*actor pp=0 dp=0: action 0[FB]\d with pp=0 dp=1 failed: .*, in the all_"
    with pytest.raises(rp.ActorDiedError, match=named):
        job.train()
    assert time.monotonic() - start < 8


def test_an_actor_that_is_stopped_while_tokens_travel_is_named_with_the_exchange(job_of):
    job = job_of(mixture(timeout=1.0))
    victim = pids(job)[1]
    threading.Timer(0.5, lambda: os.kill(victim, signal.SIGSTOP)).start()
    try:
        named = r"actor pp=0 dp=1 gives no answer.*0[FB]\d with pp=0 dp=1 failed: nothing came within 1 s, in the all_"
        with pytest.raises(rp.StalledError, match=named):
            job.train()
    finally:
        job.close()


def test_a_laptop_has_room_for_three_stages_of_two_replicas_and_their_servers():
    run = rp.Run(mesh=rp.Mesh(pp=3, dp=2), data_parallel="parameter_server")
    assert world_of(run).size == 9 <= num_slots()
