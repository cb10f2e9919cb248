"""Replicas that divide the elements of every weight compute what replicas that divide the weights compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.sharding import num_blocks
from raypar.actors.specs.model import GPT
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.optim import SGD, AdamW
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.run import Run
from tests.support.team import Team
from tests.support.thread_jobs import TeamJob


def wide(count=2, width=40):
    """Weights of 26 blocks and biases of one, so that some replicas have no part of a bias."""
    return lambda: [nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)) for _ in range(count)]


def trained(steps=3, **fields):
    team = Team(wide(), **fields)
    norms = []
    for step in range(steps):
        norms += [{result.grad_norm for result in team.step(step)} - {None}]
    return team, norms, team.gradients(), team.weights()


def equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("optim", [AdamW(lr=0.01), SGD(lr=0.1, momentum=0.9)], ids=["adamw", "sgd"])
@pytest.mark.parametrize(("pp", "dp"), [(1, 2), (2, 2), (1, 3), (1, 4)])
def test_every_bit_is_that_of_weights_owned_whole(cut, zero, optim, pp, dp):
    fields = {"pp": pp, "dp": dp, "zero": zero, "optim": optim, "m": 4}
    _, norms, gradients, weights = trained(**fields)
    cut(1, 2)
    team, others, *found = trained(**fields)
    assert team.world.cuts
    equal(found[0], gradients)
    equal(found[1], weights)
    equal(team.masters(), weights)
    for ours, theirs in zip(others, norms, strict=True):
        assert list(ours) == pytest.approx(list(theirs), rel=1e-6)
    for replica in range(dp):
        equal(team.weights(replica), weights)


TIED = GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256, tied=True)
UNTIED = GPT(layers=4, hidden=16, heads=2, seq=8, vocab=256)
EXPERTS = GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256, moe=MoE(experts=4, top_k=2))
RUNS = {
    "tied over the pipeline": (TIED, Mesh(pp=2, dp=2), {}),
    "tied on many replicas": (TIED, Mesh(pp=2, dp=3), {}),
    "tied inside one rank": (TIED, Mesh(dp=2), {}),
    "hybrid": (UNTIED, Mesh(dp=4, shard=2), {}),
    "context": (UNTIED, Mesh(dp=1, cp=2), {}),
    "tensor": (UNTIED, Mesh(dp=2, tp=2), {}),
    "bf16": (UNTIED, Mesh(dp=2), {"precision": Precision("bf16")}),
    "fp16": (UNTIED, Mesh(dp=2), {"precision": Precision("fp16")}),
    "averages": (UNTIED, Mesh(dp=2), {"ema": 0.9}),
    "microbatches": (UNTIED, Mesh(dp=2), {"zero_reduce": "microbatch"}),
    "small buckets": (UNTIED, Mesh(dp=2), {"bucket_mb": 1e-3}),
    "experts": (EXPERTS, Mesh(dp=2, ep=2), {}),
    "experts with replicas": (EXPERTS, Mesh(dp=4, ep=2), {}),
    "interleaved": (UNTIED, Mesh(pp=2, dp=2), {"chunks": 2, "schedule": "interleaved"}),
}


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("kind", list(RUNS))
def test_layouts_have_the_bits_of_weights_owned_whole(cut, kind, zero):
    model, mesh, changes = RUNS[kind]
    if zero == 1 and "zero_reduce" in changes:
        pytest.skip("level 1 reduces once a step")
    fields = {"microbatches": 4, "steps": 2, "zero": zero, "clip": None, "optim": AdamW(lr=0.01)} | changes
    run = Run(model=model, mesh=mesh, **fields)

    def made():
        team = Team.of(run)
        losses = [[result.losses for result in team.step(number)] for number in range(2)]
        found = losses, team.gradients(), team.weights()
        if run.ema is None:
            return team, *found
        for actor in team.workers:
            assert not actor.member.parts.update._updater._average.is_used
        team.each(lambda actor: actor.member.state.use_averages(use=True))
        return team, found[0], found[1], team.weights()

    _, *whole = made()
    cut(1, 2)
    team, *parts = made()
    assert team.world.cuts
    assert parts[0] == whole[0]
    equal(parts[1], whole[1])
    equal(parts[2], whole[2])
    assert_divided_evenly(team)


def assert_divided_evenly(team):
    for actor in team.workers:
        part = actor.member.parts.part
        for name in part.parameters.keys() & part.cuts.keys():
            blocks, size = num_blocks(part.parameters[name].numel()), part.cuts[name].size
            held = part.masters.parameters[name].numel() if name in part.parts else 0
            assert -(-held // 64) in (blocks // size, -(-blocks // size))


def test_a_job_puts_parts_together(cut):
    half = Precision("bf16")
    run = Run(model=UNTIED, mesh=Mesh(dp=2, tp=2), microbatches=2, steps=2, zero=1, precision=half, clip=None)
    found = []
    for levels in ((), (1,)):
        cut(*levels)
        job = TeamJob(run)
        job.step()
        name = "head.out.weight"
        gradients = job.gradients()
        assert torch.equal(job.grad(name), gradients[name])
        whole = torch.full_like(gradients[name], float("nan"))
        for shard, gradient in job.grads(name).values():
            shard.put(whole, gradient)
        assert torch.equal(whole, gradients[name])
        weights = dict(job.weights())
        assert torch.equal(job.param(name), weights[name])
        memory = job.memory()
        found.append((gradients, weights, dict(job.weights(1))))
        job.close()
        assert memory
    for ours, theirs in zip(*found, strict=True):
        equal(ours, theirs)
