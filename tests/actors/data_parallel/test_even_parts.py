"""Replicas that divide the elements of every weight compute what replicas that divide nothing compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.sharding import num_blocks
from raypar.actors.specs.lora import Lora
from raypar.actors.specs.model import GPT
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.optim import SGD, AdamW
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.run import Run
from tests.support.odd_parameters import OddParameters
from tests.support.oracle_runs import whole
from tests.support.replicas import agrees
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


def once(level):
    """Fields of a run that adds gradients up in the order of level 0: those of replicas once a step."""
    return {"zero": level} | ({"zero_reduce": "step"} if level > 1 else {})


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("optim", [AdamW(lr=0.01), SGD(lr=0.1, momentum=0.9)], ids=["adamw", "sgd"])
@pytest.mark.parametrize(("pp", "dp"), [(1, 2), (2, 2), (1, 3), (1, 4)])
def test_every_bit_is_that_of_level_0(zero, optim, pp, dp):
    fields = {"pp": pp, "dp": dp, "optim": optim, "m": 4}
    _, norms, gradients, weights = trained(**fields, **once(0))
    team, others, *found = trained(**fields, **once(zero))
    assert team.world.sharded
    equal(found[0], gradients)
    equal(found[1], weights)
    equal(team.masters(), weights)
    for ours, theirs in zip(others, norms, strict=True):
        assert list(ours) == pytest.approx(list(theirs), rel=1e-6)
    for replica in range(dp):
        equal(team.weights(replica), weights)


TIED = GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256, tied=True)
UNTIED = GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256)
EXPERTS = GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256, moe=MoE(experts=4, top_k=2))
ADAPTED = GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256, lora=Lora(rank=8))
TWO, SPLIT = Mesh(dp=2), {"schedule": "zb-h1"}
RUNS = {
    "tied over the pipeline": (TIED, Mesh(pp=2, dp=2), {}),
    "tied on many replicas": (TIED, Mesh(pp=2, dp=3), {}),
    "tied inside one rank": (TIED, TWO, {}),
    "hybrid": (UNTIED, Mesh(dp=4, shard=2), {}),
    "context": (UNTIED, Mesh(dp=1, cp=2), {}),
    "tensor": (UNTIED, Mesh(dp=2, tp=2), {}),
    "bf16": (UNTIED, TWO, {"precision": Precision("bf16")}),
    "fp16": (UNTIED, TWO, {"precision": Precision("fp16")}),
    "averages": (UNTIED, TWO, {"ema": 0.9}),
    "small buckets": (UNTIED, TWO, {"bucket_mb": 1e-3}),
    "experts": (EXPERTS, Mesh(dp=2, ep=2), {}),
    "experts with replicas": (EXPERTS, Mesh(dp=4, ep=2), {}),
    "interleaved": (replace(UNTIED, layers=4), Mesh(pp=2, dp=2), {"chunks": 2, "schedule": "interleaved"}),
    "halves of backwards": (UNTIED, Mesh(pp=2, dp=2), SPLIT),
    "tiles": (UNTIED, TWO, {"tile": 2}),
    "adapters": (ADAPTED, TWO, {}),
}


def made(model, mesh, changes, **fields):
    """The team of a run; its losses, gradients and weights, and those of its averages."""
    fields = {"microbatches": 4, "steps": 2, "clip": None, "optim": AdamW(lr=0.01)} | changes | fields
    team = Team.of(run := Run(model=model, mesh=mesh, **fields))
    losses = [[result.losses for result in team.step(number)] for number in range(2)]
    found = losses, team.gradients(), team.weights(), team.masters() if team.world.sharded else {}
    if run.ema is None:
        return team, *found
    for actor in team.workers:
        update = actor.member.parts.update
        assert not getattr(update, "_updater", update)._average.is_used
    team.each(lambda actor: actor.member.state.use_averages(use=True))
    return team, *found[:2], team.weights(), found[3]


@pytest.mark.parametrize("kind", list(RUNS))
def test_all_levels_have_the_same_bits(kind):
    """Those of level 0 too, but for copies of shards, whose sums are added up in another order."""
    levels = {level: made(*RUNS[kind], **once(level)) for level in ((1, 2, 3) if kind == "hybrid" else (0, 1, 2, 3))}
    _, losses, gradients, weights, _ = next(iter(levels.values()))
    wanted = whole(weights)
    for level in (1, 2, 3):
        team, *found, masters = levels[level]
        assert found[0] == losses
        equal(whole(found[1]), whole(gradients))
        found[2] = whole(found[2])  # at level 3 of the masters, which may have another dtype
        equal({name: weight.to(wanted[name].dtype) for name, weight in found[2].items()}, wanted)
        equal(masters, levels[1][-1])
        assert_divided_evenly(team)


def assert_divided_evenly(team):
    for actor in team.workers:
        part = actor.member.parts.part
        for name in part.parameters.keys() & part.cuts.keys():
            blocks, size = num_blocks(part.parameters[name].numel()), part.cuts[name].size
            held = part.masters.parameters[name].numel() if name in part.parts else 0
            assert -(-held // 64) in (blocks // size, -(-blocks // size))


GATHERS = {
    "microbatches": ({}, {"zero_reduce": "microbatch"}),
    "two layers a unit": ({"zero_reduce": "step"}, {"zero_units": 2}),
    "kept for the backward": ({"zero_reduce": "step"}, {"reshard_after_forward": False}),
    "kept in the last stage": ({"zero_reduce": "step"}, {"reshard_after_forward": "except_last"}),
    "once a step": ({"zero_reduce": "step"}, {"zero_gather": "step"}),
    "stages run again": ({"zero_reduce": "step"}, {"recompute": "full"}),
}


@pytest.mark.parametrize("kind", list(GATHERS))
def test_parts_are_gathered_at_any_time(kind):
    """At level 3, with the bits of level 2."""
    common, gathers = GATHERS[kind]
    mesh = Mesh(pp=2, dp=2)
    _, *second = made(UNTIED, mesh, common | ({"zero_reduce": "microbatch"} if kind == "microbatches" else {}), zero=2)
    team, *third = made(UNTIED, mesh, common | gathers, zero=3)
    assert third[0] == second[0]
    for ours, theirs in zip(third[1:], second[1:], strict=True):
        equal(ours, theirs)
    for actor in team.workers:
        parameters = actor.member.parts.part.parameters.values()
        assert all(p.isnan().all() and p.untyped_storage().nbytes() == p.element_size() for p in parameters)


class Odd(OddParameters):
    """A frozen one besides, and buffers."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.normed = nn.BatchNorm1d(40)

    def forward(self, x):
        x = self.normed(nn.functional.linear(x, self.columns)).tanh() * self.number
        return nn.functional.linear(x, self.gaps) + self.frozen + self.none.sum()


@pytest.mark.parametrize(("dp", "offload"), [(2, "none"), (5, "none"), (2, "parameters"), (5, "optimizer")])
def test_parameters_of_any_shape_and_order(dp, offload):
    """On five replicas, a replica has nothing of most of them.

    At level 0 the one with gaps has other strides, so that a product may be added up in another order.
    """
    fields = {"m": 2, "dp": dp, "optim": AdamW(lr=0.01)}
    found = []
    for level in (0, 1, 3):
        stored = {"offload": offload} if level else {}
        team = Team(lambda: [Odd(), nn.Linear(4, 4, bias=False)], 1, **fields, **stored, **once(level))
        for step in range(2):
            team.step(step)
        found.append((team.gradients(), team.weights()))
    for plain, ours, theirs in zip(*found, strict=True):
        equal(ours, theirs)
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_replicas_without_any_part():
    team = Team(lambda: [nn.Linear(4, 4, bias=False)], 1, 2, dp=3, zero=3)
    agrees(team)
    assert [len(actor.member.parts.part.masters.parameters) for actor in team.workers] == [1, 0, 0]


@pytest.mark.parametrize("dp", [2, 3])
def test_replicas_hold_and_move_equally_much(dp):
    width, layers, m = 128, 3, 2
    fn = lambda: [nn.Linear(4, width), *(nn.Linear(width, width) for _ in range(layers)), nn.Linear(width, 4)]  # noqa: E731
    team = Team(fn, 1, m, dp=dp, zero=3, zero_reduce="microbatch", optim=AdamW(lr=0.01))
    before = team.ledger("dp")
    team.step()
    moved = [
        {op: after[op][1] - earlier.get(op, (0, 0))[1] for op in after}
        for after, earlier in zip(team.ledger("dp"), before, strict=True)
    ]
    sizes = [p.numel() for p in team.workers[0].member.parts.part.parameters.values()]
    own = [sum(p.numel() for p in actor.member.parts.part.layer_shards.values()) for actor in team.workers]
    assert sum(own) == sum(sizes)
    flags = sum(len(actor.member.parts.part.parts) for actor in team.workers)
    assert [one["all_gather"] for one in moved] == [2 * m * (dp - 1) * count * 4 for count in own]
    assert sum(one["reduce_scatter"] for one in moved) == m * (dp - 1) * (sum(sizes) + flags) * 4
    for found in (own, *([one[op] for one in moved] for op in ("all_gather", "reduce_scatter"))):
        assert max(found) <= 1.02 * sum(found) / dp
    for actor, count in zip(team.workers, own, strict=True):
        held = actor.held()
        states = 8 * count + 4 * len(actor.member.parts.part.parts)
        assert [held.most[kind] for kind in ("weights", "gradients", "optimizer")] == [4 * count, 4 * count, states]
        assert held.now["gathered"] == 0


JOBS = {
    "halves": (1, Mesh(dp=2, tp=2), {"precision": Precision("bf16")}),
    "gathered": (3, Mesh(dp=2, tp=2), {}),
    "gathered halves": (3, Mesh(dp=2), {"precision": Precision("bf16"), "tile": {"blocks.*.mlp.*": 2}}),
    "copies of shards": (3, Mesh(pp=2, dp=4, shard=2), {}),
}


@pytest.mark.parametrize("kind", list(JOBS))
def test_a_job_puts_parts_together(kind):
    zero, mesh, changes = JOBS[kind]
    found = []
    for level in (1 if mesh.shard else 0, zero):
        job = TeamJob(Run(model=TIED, mesh=mesh, microbatches=2, steps=2, clip=None, **changes, **once(level)))
        job.step()
        name = "blocks.1.mlp.up.weight"
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
    for theirs, ours in zip(*found, strict=True):  # at level 3 of the masters, which may have another dtype
        equal({name: one.to(theirs[name].dtype) for name, one in ours.items()}, theirs)
