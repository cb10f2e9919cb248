"""Replicas and parameter servers that go wrong: what is said, and how soon."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.machine.this_machine import num_slots
from raypar.actors.specs.worlds import world_of

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
    """A linear layer that sleeps before each forward, and may begin with weights that are constants."""

    def __init__(self, sleep=0.0, value=None):
        super().__init__()
        self.inner, self.sleep = nn.Linear(4, 4), sleep
        if value is not None:
            self.inner.weight = nn.Parameter(torch.full((4, 4), value))  # is not drawn, and so not sent

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


@pytest.mark.long
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


@pytest.fixture
def errors(monkeypatch):
    """What the errors say that a run survives; nobody waits long for an actor that was given up already."""
    said = []
    monkeypatch.setattr("raypar.job.recover.restarts.HEARD", 1.0)
    monkeypatch.setattr("raypar.job.recover.restarts.failure_line", lambda error: said.append(str(error)) or said[-1])
    return said


@pytest.mark.long
def test_a_server_that_is_killed_or_stopped_is_named_and_so_is_its_replica(kept_actors, errors):
    """One run survives all of them."""
    run, server = small(lambda: [nn.Linear(4, 4)], timeout=2.0, max_failures=3, **SERVED), "server 0 of pp=0"
    chaos = [
        rp.chaos.kill("pp=0 dp=0", at="0F1", step=2),
        rp.chaos.kill(server, at="STEP", step=3),
        rp.chaos.stop(server, at="STEP", step=5),
    ]
    with rp.launch(run, chaos=chaos) as job:
        job.train()
        assert [failure.replaced for failure in job.failures] == [("pp=0 dp=0",), (server,), (server,)]
    assert errors[0].startswith("actor pp=0 dp=0 died during step 2")
    assert errors[1].startswith(f"actor {server} died during step 3")
    assert server in errors[2]


class Mixture(nn.Module):
    """Two experts; every token goes to both. Whoever is done first waits in an all-to-all for the other."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        chosen = torch.tensor([[0, 1]]).expand(len(x), 2)
        return rp.run_experts(x, self.experts, chosen, x[:, :2].sigmoid())


@pytest.mark.long
def test_an_actor_that_is_killed_or_stopped_is_named_with_the_exchange_in_which_others_wait(kept_actors, errors):
    """One run survives it: while tokens travel, and while replicas wait for one another."""
    plan = {"layers.*.experts": "expert"}
    model = rp.Layers(lambda: [nn.Linear(4, 4), Mixture()], nn.functional.mse_loss, plan=plan)
    fields = {"mesh": rp.Mesh(dp=2, ep=2), "data": rp.Batches(batch), "optim": rp.SGD(lr=0.1), "microbatches": 2}
    chaos = [
        rp.chaos.kill("dp=1", at="0F1", step=2),
        rp.chaos.stop("dp=1", at="0F1", step=4),
        rp.chaos.stop("dp=1", at="STEP", step=6),
    ]
    with rp.launch(rp.Run(model=model, steps=6, timeout=2.0, max_failures=3, **fields), chaos=chaos) as job:
        job.train()
    killed, tokens, replicas = errors
    named, waits = "actor pp=0 dp=1 gives no answer.* seen from the others: ", "with pp=0 dp=1 failed: "
    seen = r"seen from the others: actor pp=0 dp=0: action 0[FB]\d "
    assert re.match(rf"actor pp=0 dp=1 died during step 2.*{seen}{waits}.*, in the all_", killed)
    assert re.match(rf"{named}.*0[FB]\d {waits}nothing came within 2 s, in the all_", tokens)
    assert re.match(rf"{named}actor pp=0 dp=0: action STEP {waits}nothing came within 2 s", replicas)


def test_a_laptop_has_room_for_three_stages_of_two_replicas_and_their_servers():
    run = rp.Run(mesh=rp.Mesh(pp=3, dp=2), data_parallel="parameter_server")
    assert world_of(run).size == 9 <= num_slots()
