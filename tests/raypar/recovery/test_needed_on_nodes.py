"""A recovery on several nodes sends each node what its actors need: counted with stand-ins, 8 on a node."""

from __future__ import annotations

import pytest
import torch

import raypar as rp
from raypar.actors.mesh.world import World
from tests.support.counted_stand_ins import CountedCluster
from tests.support.stand_ins import StandIn

STATE = 4 * 2 * 8192 * 4  # bytes: four layers, each with a weight and what the optimizer keeps of it, 8192 x 1 in fp32
MODEL = rp.GPT(layers=4, hidden=64, heads=8, seq=8, vocab=64)
VICTIM, OTHER = 5, 1  # ranks


def batch(step, microbatch, dp):
    ids = torch.full((1, 8), dp % 64)
    return ids, ids


def run_on(mesh, zero=0, **settings):
    fields = {"microbatches": 4, "micro_batch_size": 1, "steps": 20, "device": "cpu", "max_failures": 1, "zero": zero}
    return rp.Run(model=MODEL, data=rp.Batches(batch, batch), mesh=mesh, **(fields | settings))


def recovered(run, actors):
    """A cluster of stand-ins after a step in which one of them has died, and the failures that its run has survived."""
    cluster = CountedCluster(actors + 8)
    chaos = [rp.chaos.kill(World(run.mesh).label(VICTIM), at="end", step=2)]
    with cluster.serving(), rp.launch(run, chaos=chaos) as job:
        job.step(), job.step()
        assert (job.next_step, {failure.source for failure in job.failures}) == (2, {"memory"})
        return cluster, job.failures


@pytest.mark.parametrize("size", [16, 64, 128])
def test_of_replicas_with_copies_of_one_state_each_other_node_gets_it_once(size):
    cluster, _ = recovered(run_on(rp.Mesh(dp=size)), size)
    assert cluster.sent == (size // 8 - 1) * STATE


def test_of_tensor_groups_each_node_gets_what_its_stages_have():
    """Each of four stages is on two nodes, with two replicas of four tensor ranks: the second one gets its quarter."""
    cluster, _ = recovered(run_on(rp.Mesh(pp=4, tp=4, dp=4)), 64)
    assert cluster.sent == STATE


def test_on_one_node_nobody_is_asked_what_is_where():
    cluster, _ = recovered(run_on(rp.Mesh(dp=8)), 8)
    assert (cluster.calls["restore"], cluster.sent) == (8, 0)
    assert not {"snapshot_contents", "needed_shares", "expect_copies"} & {*cluster.calls}


@pytest.mark.parametrize("method", ["snapshot_contents", "needed_shares", "send_snapshots", "restore"])
def test_an_actor_that_dies_meanwhile_is_replaced_too(monkeypatch, method):
    really, dead, run = getattr(StandIn, method), [], run_on(rp.Mesh(dp=24), max_failures=2)

    def dies(self, *args):
        if self.plan.rank == OTHER and not dead:
            dead.append(method)
            self.die()
        return really(self, *args)

    monkeypatch.setattr(StandIn, method, dies)
    _, (failure,) = recovered(run, 24)
    assert dead == [method]
    assert (failure.back_to, failure.replaced) == (1, tuple(map(World(run.mesh).label, (VICTIM, OTHER))))
