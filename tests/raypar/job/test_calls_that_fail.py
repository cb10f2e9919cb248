"""An exception in a call that changes no weight ends that call: the job goes on, and no bit is another one."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.cluster.calls.calls import ray
from raypar.job.start.lifetime import Lifetime
from tests.raypar.job.test_faults import pids

pytestmark = pytest.mark.usefixtures("by_value")


class Moved(nn.Module):
    """A layer with state of every kind: weights, buffers, and a frozen weight that its forward moves."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.inner.weight, 0.25)
        return self.norm(self.inner(x)) + self.teacher(x).detach()


def loss(output, target):
    if target[0, 0] > 100:
        raise ZeroDivisionError("this target is not for me")
    return nn.functional.mse_loss(output, target)


def batch(step, microbatch, dp):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + 10 * microbatch + dp))
    return x, x.sin()


def wrong(step, microbatch, dp):
    x, y = batch(step, microbatch, dp)
    return x, y + 1000.0 * (dp == 1 and microbatch == 1)


def run_of(**changes):
    fields = {"mesh": rp.Mesh(pp=2, dp=2), "microbatches": 2, "optim": rp.AdamW(lr=0.01), "steps": 6, "zero": 1}
    model = rp.Layers(lambda: [Moved(), Moved()], loss)
    fields |= {"data": rp.Batches(batch, validate=wrong), "ema": 0.9, "timeout": 60.0}
    return rp.Run(model=model, **(fields | changes))


def trained(job, *, evaluates):
    """The losses of four steps and all state then, with a failing evaluation behind the second one, or without."""
    losses = [job.step().loss for _ in range(2)]
    if evaluates:
        with pytest.raises(rp.CallError, match=r"(?s)^actor pp=. dp=1: .*ZeroDivisionError: this target is not for me"):
            job.evaluate()
    losses += [job.step().loss for _ in range(2)]
    return losses, dict(job.weights())


def breaks_generation(actor):
    """Let the next token that this actor chooses be an exception."""
    from raypar.actors.worker.generation import ActorGeneration

    choose = ActorGeneration._choose

    def raises(*args):
        ActorGeneration._choose = choose
        raise ZeroDivisionError("no token today")

    ActorGeneration._choose = raises


@pytest.mark.long
def test_a_generation_that_fails_ends_alone(cluster, caplog):
    """On a pipeline, the other stage waits for the token; steps ahead of it are dropped."""
    model = rp.GPT(layers=2, hidden=8, heads=2, seq=16, vocab=29)
    run = rp.Run(model=model, data=rp.Batches(tokens), mesh=rp.Mesh(pp=2), microbatches=2, steps=4, timeout=60.0)
    with rp.launch(run) as job:
        job.step()
        expected = job.generate([[1, 2, 3]], 6)
        score = job.score([[1, 2, 3]])
        ray.get([handle.__ray_call__.remote(breaks_generation) for handle in job._loop.loaded.handles])
        with pytest.raises(rp.CallError, match=r"^actor pp=1: action 1F0 failed: ZeroDivisionError: no token today"):
            job.generate([[1, 2, 3]], 6)
        assert "no weight was changed, and the job goes on after step 1" in caplog.text
        assert job.generate([[1, 2, 3]], 6) == expected
        assert job.score([[1, 2, 3]]) == score
        assert job.step().step == 1


def tokens(step, microbatch, dp):
    x = torch.randint(0, 29, (2, 9), generator=torch.Generator().manual_seed(10 * step + microbatch))
    return x[:, :-1], x[:, 1:]


def test_a_ctrl_c_during_a_call_that_fails_is_not_lost():
    lifetime = Lifetime(SimpleNamespace(reachable=lambda: True), lambda: None, lambda: None)

    with pytest.raises(KeyboardInterrupt) as caught, lifetime.guarded():
        os.kill(os.getpid(), signal.SIGINT)
        raise rp.CallError("no token today")
    assert isinstance(caught.value.__context__, rp.CallError)
    assert lifetime.failure is None


def dies(step, microbatch, dp):
    """A batch of which the launch looks at the first one alone."""
    if microbatch:
        os._exit(3)
    return batch(step, microbatch, dp)


RUNS = {
    "replicas": {"mesh": rp.Mesh(dp=2)},
    "stages": {},
    "snapshots, zero 3": {"max_failures": 1, "zero": 3},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name != "replicas")) for name in RUNS])
def test_an_evaluation_that_fails_ends_alone(cluster, name):
    changes = RUNS[name]
    with rp.launch(run_of(**changes)) as job:
        before = pids(job)
        losses, weights = trained(job, evaluates=True)
        assert pids(job) == before
        assert not job.failures
        job.reset(run_of(**changes))
        others, expected = trained(job, evaluates=False)
        assert losses == others
        for name, one in expected.items():
            assert torch.equal(weights[name], one), name


@pytest.mark.long
def test_an_actor_that_dies_in_an_evaluation_ends_the_job(cluster):
    """What is known of no living actor is the job's end, as before."""
    data = rp.Batches(batch, validate=dies)
    with rp.launch(run_of(data=data)) as job:
        job.step()
        with pytest.raises(rp.ActorDiedError):
            job.evaluate()
        with pytest.raises(rp.JobError, match="this job is over"):
            job.step()
