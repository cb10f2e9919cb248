"""Experts on actors of their own: who holds what, parity with one process, the bytes that move, steps by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.mesh.memberships import memberships
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import World
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Layers
from raypar.actors.specs.optim import SGD
from raypar.config.recipes import recipe
from raypar.config.run import check_run
from raypar.errors import ConfigError
from raypar.schedules.action import Op
from tests.support.replicas import agrees
from tests.support.snapshots import loaded, read, saved
from tests.support.team import Team, batch, mse
from tests.support.thread_jobs import TeamJob

TINY = recipe("moe-tiny")
# Threads share one generator, so there is no dropout here; a test of jobs has it.
MODEL = replace(TINY.model, layers=2, dropout=0.0, seq=8, hidden=16, heads=2)
RUN = replace(TINY, model=MODEL, microbatches=2, steps=2, timeout=20.0)
TWO = Mesh(dp=2, expert_actors=2)
SPARSE = replace(MODEL, layers=4, moe=replace(MODEL.moe, first=0, every=3))
TIED = replace(RUN.model, tied=True)
LAYOUTS = {
    "one": {"mesh": Mesh(expert_actors=1)},
    "two beside two": {"mesh": TWO},
    "four beside two, zero 3": {"mesh": Mesh(dp=2, expert_actors=4), "zero": 3},
    "zero 2, recomputation": {"mesh": TWO, "zero": 2, "recompute": "full"},
    "some layers again": {"mesh": TWO, "zero": 0, "recompute": ("full", "none")},
    "tensor ranks": {"mesh": Mesh(tp=2, expert_actors=2)},
    "parts of sequences": {"mesh": Mesh(tp=2, expert_actors=1), "sequence_parallel": True},
    "context": {"mesh": Mesh(cp=2, expert_actors=1)},
    "offload": {"mesh": TWO, "zero": 3, "offload": "parameters"},
    "pipeline": {"mesh": Mesh(pp=2, dp=2, expert_actors=1), "recompute": "full"},
    "split backwards": {"mesh": Mesh(pp=2, expert_actors=2), "backward": "split"},
    "tied, without zero": {"mesh": Mesh(pp=2, dp=2, expert_actors=2), "zero": 0, "model": TIED},
    "stages without experts": {"mesh": Mesh(pp=2, expert_actors=1), "schedule": "interleaved", "model": SPARSE},
}


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_actors_of_experts_train_as_in_one_process(layout):
    agrees(Team.of(replace(RUN, **layout)), 2e-5)


class Own(nn.Module):
    """A residual layer of the user's, with a router and four experts."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        gates, chosen = self.router(x).softmax(-1).topk(2)
        return x + rp.run_experts(x, self.experts, chosen, gates)


def own():
    return [nn.Linear(4, 4), Own(), Own()]


def frozen():
    """Of the first layers only experts are trained."""
    layers = own()
    for name, parameter in nn.ModuleList(layers[:2]).named_parameters():
        parameter.requires_grad = "experts" in name
    return layers


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mesh", "fn", "recompute"),
    [
        (Mesh(dp=2, ep=2), own, "none"),
        (Mesh(pp=2, dp=2, expert_actors=2), own, "none"),
        (TWO, frozen, "none"),
        (TWO, frozen, "full"),
        (TWO, frozen, ("none", "full", "none")),  # the experts are reached only through what the layer recomputes
    ],
)
def test_experts_of_own_layers(mesh, fn, recompute):
    model = Layers(fn, mse, plan={"layers.*.experts": "expert"}, halves=True)
    changes = {"data": Batches(batch), "optim": SGD(lr=0.1), "recompute": recompute}
    agrees(Team.of(replace(RUN, model=model, mesh=mesh, **changes)), 2e-5)


def test_two_actors_have_the_experts_and_the_ranks_all_else():
    """The picture of docs/experts.md, and the groups."""
    world = World.of(Mesh(pp=2, dp=2, expert_actors=2), "all_reduce", 1, None)
    assert [world.label(rank) for rank in range(world.size)] == [
        *("pp=0 dp=0", "pp=0 dp=1", "pp=1 dp=0", "pp=1 dp=1"),
        *("pp=0 expert=0", "pp=0 expert=1", "pp=1 expert=0", "pp=1 expert=1"),
    ]
    groups = {rank: {one.key: one.members for one in memberships(world, rank)} for rank in range(world.size)}
    first, every = (0, 1, 4, 5), tuple(range(8))
    assert groups[0] == {"pp": (0, 2), "dp": (0, 1), "ep": first, "mesh": every}
    assert groups[4] == {"ep": first, "mesh": every}
    assert groups[7] == {"ep": (2, 3, 6, 7), "mesh": every}
    team = Team.of(replace(RUN, mesh=TWO))
    experts = [{name for name in actor.holds() if ".experts." in name} for actor in team.all]
    assert experts[0] == experts[1] == set()
    assert [{int(name.split(".")[4]) for name in held} for held in experts[2:]] == [{0, 1}, {2, 3}]
    assert [set(actor.holds()) for actor in team.all[2:]] == experts[2:]
    assert not any(".experts." in name for name in team.all[0].holds())


def test_every_token_travels_to_its_experts_and_back_and_nothing_else_of_them_does():
    team = Team.of(replace(RUN, mesh=TWO, zero=0))
    team.step()
    layers, rows = MODEL.layers, RUN.micro_batch_size * MODEL.seq * MODEL.moe.top_k * RUN.microbatches
    row_bytes = 4 * MODEL.hidden
    ranks, experts = team.ledger("ep")[:2], team.ledger("ep")[2:]
    for ledger in (*ranks, *experts):
        assert ledger["all_to_all"][0] == 4 * layers * RUN.microbatches
    for ledger in ranks:  # each row in the forward, and its gradient in the backward
        assert ledger["all_to_all"][1] == 2 * layers * rows * row_bytes
    assert sum(ledger["all_to_all"][1] for ledger in experts) == 2 * 2 * layers * rows * row_bytes
    assert [{axis for axis, _ in actor.ledger()} for actor in team.all[2:]] == [{"ep", "mesh"}] * 2
    dense = 4 * sum(math.prod(shard.whole) for shard in team.all[0].holds().values())
    assert team.ledger("dp")[0]["all_reduce"][1] >= dense


def test_a_step_by_hand_is_the_compiled_step():
    run = replace(RUN, mesh=Mesh(pp=2, expert_actors=1))
    compiled, by_hand = TeamJob(run), TeamJob(run)
    try:
        wanted = compiled.step()
        stepper = by_hand.stepper()
        stepper.run_to("1F0")
        held = stepper.state()
        assert [one.actor for one in held] == ["pp=0", "pp=1", "pp=0 expert=0", "pp=1 expert=0"]
        assert held[0].in_flight == held[2].in_flight
        stepper.rewind()
        stepper.next()
        report = stepper.finish()
        assert (report.loss, report.grad_norm) == (wanted.loss, wanted.grad_norm)
        weights = dict(by_hand.weights().items())
        assert all(torch.equal(weights[name], weight) for name, weight in compiled.weights().items())
        assert weights.keys() == compiled.parameters.keys()
        name = "blocks.1.mlp.experts.3.up.weight"
        assert torch.equal(by_hand.param(name), weights[name])
        assert float(by_hand.grad(name).norm()) > 0
        assert by_hand.gradients().keys() == weights.keys()
    finally:
        compiled.close()
        by_hand.close()


def test_a_step_by_hand_in_any_order_is_the_compiled_step():
    run = replace(RUN, mesh=Mesh(pp=2, dp=2, expert_actors=2), expert_rounds=2, backward="split")
    compiled, by_hand = TeamJob(run), TeamJob(run)
    try:
        wanted, stepper, dice = compiled.step(), by_hand.stepper(), random.Random(0)
        while ready := list(stepper.ready()):
            stepper.do(dice.choice(ready))
        report = stepper.finish()
        assert (report.loss, report.grad_norm) == (wanted.loss, wanted.grad_norm)
    finally:
        compiled.close()
        by_hand.close()


def test_an_expert_actor_performs_the_row_of_its_stage_and_has_a_timeline():
    job = TeamJob(replace(RUN, mesh=Mesh(pp=2, dp=2, expert_actors=1)))
    try:
        job.step()
        *replicas, experts = job.timelines()
        assert len(replicas) == 2
        assert {event.actor for event in experts.events} == {"pp=0 expert=0", "pp=1 expert=0"}
        rows = {
            one: [
                [event.action for event in one.events if event.rank == pp and event.action.op is Op.F] for pp in (0, 1)
            ]
            for one in (replicas[0], experts)
        }
        assert rows[experts] == rows[replicas[0]]
    finally:
        job.close()


@pytest.mark.long
def test_checkpoints_go_to_other_layouts_and_back(tmp_path):
    own = Team.of(replace(RUN, mesh=TWO))
    own.step()
    first, tensors = read(own, tmp_path)
    there = loaded(Team.of(replace(RUN, mesh=Mesh(pp=2, expert_actors=4))), tmp_path, tensors)
    (tmp_path / "there").mkdir()
    back = loaded(Team.of(replace(RUN, mesh=TWO)), tmp_path / "there", saved(there, tmp_path / "there"))
    again, _ = read(back, tmp_path / "again")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(".experts." in name and name.startswith("optim") for name in first)
    assert [result.losses for result in back.step(1)] == [result.losses for result in own.step(1)]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mesh": Mesh(dp=2, expert_actors=3)}, "set model.moe.experts to 3 or 6, or set mesh.expert_actors to 2"),
        ({"mesh": Mesh(expert_actors=-1)}, "mesh.expert_actors is -1: it must be at least 0"),
        ({"mesh": Mesh(dp=2, ep=2, expert_actors=2)}, "experts are on actors of their own or on ranks"),
        ({"mesh": Mesh(tp=2, etp=2, expert_actors=2)}, "an expert is whole on its actor: leave mesh.etp out"),
        ({"mesh": Mesh(tp="2d:2x2", expert_actors=2)}, "a grid of tensor ranks has no experts"),
        (
            {"mesh": Mesh(dp=4, shard=2, expert_actors=2)},
            "raypar has no experts on several actors with hybrid sharding yet",
        ),
        ({"mesh": TWO, "model": recipe("gpt-tiny").model}, "no experts to divide: give model.moe, or set"),
        ({"mesh": TWO, "data_parallel": "parameter_server"}, "servers hold all weights of a replica"),
        ({"mesh": Mesh(pp=4, expert_actors=1), "model": SPARSE}, "but pp=1 has no layer with experts"),
    ],
)
def test_what_expert_actors_can_not_do_is_told_with_what_would(changes, told):
    with pytest.raises(ConfigError) as error:
        check_run(replace(RUN, **changes))
    assert told in str(error.value)
