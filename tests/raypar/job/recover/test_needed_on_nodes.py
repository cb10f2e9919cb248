"""A recovery on several nodes sends each node what its actors need: counted with stand-ins, 8 on a node."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

import raypar as rp
from raypar.actors.checkpoint.snapshot_address import SnapshotOwner
from raypar.actors.mesh.world import World
from raypar.actors.relayout.share_index import ShareIndex
from raypar.cluster.calls.calls import Calls
from raypar.job.recover.snapshots import Snapshots
from tests.support.counted_stand_ins import CountedCluster
from tests.support.stand_in_parts import boxes_of, contents_of, parts_of, saved_parts
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


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("size", [16, 64, pytest.param(128, marks=pytest.mark.long)])
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
    assert not {"contents", "needed_shares", "expect_copies"} & {*cluster.calls}


@pytest.mark.sampled
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


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("size", [16, 256])
def test_with_fewer_replicas_and_in_tensor_groups_each_actor_needs_as_few(size, zero):
    """Of sharded states, each of half as many replicas needs two shares, besides the one that has the weights."""
    index = ShareIndex(
        {
            SnapshotOwner(0, rank): contents_of(saved_parts(World(rp.Mesh(dp=size), zero=zero), rank))
            for rank in range(size)
        }
    )
    for mesh, shares in ((rp.Mesh(dp=size // 2), 3), (rp.Mesh(dp=size // 2, tp=2), 2)):
        after = World(mesh, zero=zero)
        needed = [index.needed(boxes_of(parts_of(after, rank))) for rank in range(after.size)]
        assert max(map(len, needed)) == (shares if zero else 1)
        assert all(SnapshotOwner(0, 0) in of_one for of_one in needed)


class Moved:
    """Two actors with ranks on node a, and one on node b whose rank the second one has now; it had it until step 5."""

    def __init__(self):
        self.world, self.cluster = World(rp.Mesh(dp=2), zero=1), CountedCluster(8)
        self.handles = [self.cluster.handle(number, node) for number, node in enumerate("aab")]
        for handle, rank in zip(self.handles, (0, 1, 1), strict=True):
            handle.start.remote(SimpleNamespace(layout=0, rank=rank, world=self.world))
        for number in (0, 2):
            self.handles[number].begin_snapshots.remote(5)
        self.handles[1].hold_snapshots.remote(self.handles[0].snapshot_addresses.remote().result())

    def restore(self):
        snapshots, first = Snapshots(), Calls(self.handles[:2], self.world, 20.0)
        snapshots.source = (SnapshotOwner(0, 0), SnapshotOwner(0, 1))
        steps = [handle.snapshot_steps.remote().result() for handle in self.handles]
        processes = [handle.located.remote().result().process for handle in self.handles[:2]]
        loaded, others = SimpleNamespace(calls=first, world=self.world), Calls(self.handles[2:], self.world, 20.0)
        with self.cluster.serving(), closing(snapshots):
            snapshots.restore(loaded, others, steps, 5, processes)


def test_an_actor_without_a_rank_says_what_it_has_and_gives_it():
    moved = Moved()
    moved.restore()
    assert moved.cluster.sent == STATE // 4, "the half of what the optimizer keeps"
    assert [handle.snapshot_steps.remote().result() for handle in moved.handles[:2]] == [
        {SnapshotOwner(0, 0): (5,)},
        {SnapshotOwner(0, 0): (5,), SnapshotOwner(0, 1): (5,)},
    ]


def test_where_it_dies_then_the_recovery_is_tried_again(monkeypatch):
    really = StandIn.snapshot_contents
    monkeypatch.setattr(
        StandIn, "snapshot_contents", lambda self, *args: self.die() if self.key.node == "b" else really(self, *args)
    )
    with pytest.raises(rp.JobError, match="finding the snapshots of step 5 failed: an actor that leaves the run gave"):
        Moved().restore()
