"""Faults among many actors, which are stand-ins: who is at fault is named as soon as among few, and nothing hangs."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
import torch

import raypar as rp
from raypar.actors.mesh.world import World
from tests.support.stand_in_cluster import StandInCluster, start_crowd
from tests.support.stand_ins import Pace

VICTIM, TIMEOUT, PACE = 5, 1.0, Pace(0.1)
SIZES = [32, pytest.param(1024, marks=[pytest.mark.long, pytest.mark.timeout(180)])]
pytestmark = [pytest.mark.parametrize("actors", SIZES), pytest.mark.long]  # seconds each, of a cluster of their own


def batch(step, microbatch, dp):
    ids = torch.full((1, 8), dp % 64)
    return ids, ids


def run_of(actors, **settings):
    model = rp.GPT(layers=4, hidden=64, heads=8, seq=8, vocab=64)
    fields = {"microbatches": 1, "micro_batch_size": 1, "device": "cpu", "steps": 20, "timeout": TIMEOUT}
    data = rp.Batches(batch, batch)
    return rp.Run(model=model, data=data, mesh=rp.Mesh(pp=2, dp=actors // 2), **(fields | settings))


@pytest.fixture(scope="module")
def crowd(cluster):
    """A process of stand-ins."""
    process = start_crowd(PACE)
    yield process
    cluster.kill(process)


@contextmanager
def job_of(run, crowd, fault):
    """A job over stand-ins, to one of which something happens in its second step."""
    alone = [VICTIM] * (fault.kind == "kill")
    cluster = StandInCluster(run.mesh.actors + 8, [crowd], PACE, alone)
    try:
        with cluster.serving(), rp.launch(run, chaos=[fault]) as job:
            job.step()
            yield job
    finally:
        cluster.close()


def name_of(run):
    return World(run.mesh).label(VICTIM)


FAULTS = {
    "dead": ({"kind": "kill"}, "actor {name} died during step 2", 5.0),
    "silent": ({"kind": "stop"}, "actor {name} was silent for", 12.0),
    "late": ({"kind": "delay", "seconds": 60.0}, "actor {name} was in action 0F0 for", 12.0),
    "lying": ({"kind": "corrupt"}, "actor {name} was silent for", 12.0),
    "failing": ({"kind": "raise"}, "actor {name}: action end", 5.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_one_at_fault_is_named_in_time(actors, crowd, fault):
    what, told, seconds = FAULTS[fault]
    run = run_of(actors)
    with (
        pytest.raises(rp.JobError) as raised,
        job_of(run, crowd, rp.chaos.InjectedFault(actor=name_of(run), at="end", step=2, **what)) as job,
    ):
        start = time.monotonic()
        job.step()
    assert str(raised.value).startswith(told.format(name=name_of(run)))
    assert time.monotonic() - start < seconds


def test_one_that_is_late_within_the_deadline_is_no_fault(actors, crowd):
    run = run_of(actors)
    with job_of(run, crowd, rp.chaos.delay(name_of(run), at="end", step=2, seconds=2 * TIMEOUT)) as job:
        assert job.step().step == 1
        assert job.step().step == 2


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_the_run_goes_on_with_another_one(actors, crowd, kind):
    run = run_of(actors, max_failures=1)
    with job_of(run, crowd, rp.chaos.InjectedFault(kind, name_of(run), "end", 2)) as job:
        assert job.step().step == 1
        (failure,) = job.failures
        assert failure.replaced == (name_of(run),) and (failure.back_to, failure.source) == (1, "memory")
