"""Experts divided over actors: the user's layouts, parity with one process, and the bytes that move."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.data_parallel.replica_checks import UnequalReplicasError
from raypar.actors.expert_parallel import shadowing
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Layers
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.optim import SGD
from raypar.config.recipes import recipe
from raypar.config.run import check_run
from raypar.errors import ConfigError
from raypar.reporting.report import report_of
from tests.support.replicas import agrees
from tests.support.team import Team, batch, mse
from tests.support.thinned import thinned

TINY = recipe("moe-tiny")
# Threads share one generator, so there is no dropout here; tests of jobs have it.
RUN = replace(TINY, model=replace(TINY.model, layers=2, dropout=0.0), microbatches=2, steps=2, timeout=20.0)
# All that a layer of experts does with whole sequences.
MOE = replace(RUN.model.moe, gate="sigmoid", bias_rate=0.01, capacity=0.7, loss="gshard", z_loss=0.01, shared=1)
MANY = replace(RUN.model, moe=MOE)
LAYOUTS = {
    "ep2 x dp2": {"mesh": Mesh(dp=4, ep=2)},
    "without zero": {"mesh": Mesh(dp=4, ep=2), "zero": 0},
    "zero 2": {"mesh": Mesh(dp=4, ep=2), "zero": 2},
    "zero 3": {"mesh": Mesh(dp=4, ep=2), "zero": 3},
    "pure ep4": {"mesh": Mesh(dp=4, ep=4)},
    "zero 2, offload": {"mesh": Mesh(dp=4, ep=2), "zero": 2, "offload": "optimizer"},
    "pure ep2, offload of weights": {"mesh": Mesh(dp=2, ep=2), "offload": "parameters"},
    "pure ep2, zero 3": {"mesh": Mesh(dp=2, ep=2), "zero": 3},
    "on tensor ranks": {"mesh": Mesh(dp=2, tp=2, ep=2)},
    "on tensor ranks alone": {"mesh": Mesh(tp=2, ep=2)},
    "on all ranks": {"mesh": Mesh(dp=2, tp=2, ep=4)},
    "tensor-parallel experts": {"mesh": Mesh(dp=2, tp=2, ep=2, etp=2)},
    "sequence parallel": {"mesh": Mesh(dp=2, tp=2, ep=2, etp=2), "sequence_parallel": True},
    "whole experts, parts of sequences": {"mesh": Mesh(cp=2, tp=2, ep=2), "sequence_parallel": True, "model": MANY},
    "context": {"mesh": Mesh(cp=2, ep=2)},
    "context and replicas": {"mesh": Mesh(dp=2, cp=2, ep=2)},
    "pipeline": {"mesh": Mesh(pp=2, dp=2, ep=2), "schedule": "1f1b"},
    "pipeline, split backwards": {"mesh": Mesh(pp=2, dp=2, ep=2), "backward": "split"},
    "recomputation": {"mesh": Mesh(dp=2, ep=2), "recompute": "full"},
    "tied, without zero": {"mesh": Mesh(pp=2, dp=2, ep=2), "zero": 0, "model": replace(RUN.model, tied=True)},
    "tied, zero 1": {"mesh": Mesh(pp=2, dp=2, ep=2), "zero": 1, "model": replace(RUN.model, tied=True)},
    "tied, context, without zero": {"mesh": Mesh(pp=2, cp=2, ep=2), "zero": 0, "model": replace(RUN.model, tied=True)},
}
LONG = (
    "ep2 x dp2",
    "without zero",
    "pure ep4",
    "pure ep2, offload of weights",
    "on tensor ranks",
    "on all ranks",
    "context",
    "pipeline",
    "recomputation",
    "tied, without zero",
)


@pytest.mark.sampled
@pytest.mark.parametrize("layout", thinned(LAYOUTS, lambda layout: layout not in LONG))
def test_experts_on_several_actors_train_as_in_one_process(layout):
    # With the text of Python 3.13, the default of data, rounding moves a weight's tensor by 3e-5 of its norm.
    agrees(Team.of(replace(RUN, **LAYOUTS[layout])), 1e-4)


class Mixture(nn.Module):
    """Own experts, of which each token has the better two, with a load and a penalty that are told."""

    def __init__(self):
        super().__init__()
        self.router, self.load = nn.Linear(4, 4), rp.RouterLoad(4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(4))
        self.penalty = rp.AuxiliaryLoss("penalty", 0.01)

    def forward(self, x):
        scores = self.router(x)
        gates, chosen = scores.softmax(-1).topk(2)
        made = rp.run_experts(x, self.experts, self.load(chosen, scores), gates)
        return x + self.penalty(made, scores.square().mean())


OWN = {
    "replicas": {"mesh": Mesh(dp=4, ep=2)},
    "zero 3": {"mesh": Mesh(dp=4, ep=2), "zero": 3},
    "pipeline": {"mesh": Mesh(pp=2, dp=2, ep=2)},
}


@pytest.mark.sampled
@pytest.mark.parametrize("layout", OWN.values(), ids=OWN.keys())
def test_own_experts_on_several_actors_train_as_in_one_process(layout):
    model = Layers(mixtures, mse, plan={"layers.*.experts": "expert"})
    data = Batches(batch, batch)
    run = replace(RUN, model=model, data=data, optim=SGD(lr=0.1), **layout)
    team = Team.of(run)
    agrees(team, 2e-5)
    names = [name for name in team.all[0].holds() if ".experts." in name]
    assert {name.split(".")[3] for name in names} == {"0", "1"}


@pytest.mark.parametrize("changes", [{"zero": 3}, {"expert_shadows": 2}])
def test_own_experts_may_be_frozen(changes, monkeypatch):
    def layers():
        mixture = Mixture()
        mixture.router.bias.data.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))  # the first two are popular
        for number in (0, 3):
            mixture.experts[number].requires_grad_(False)
        return [mixture]

    monkeypatch.setattr(shadowing, "FLOPS", 1e3)  # so that to share out a popular expert's products always pays
    model = Layers(layers, mse, plan={"layers.*.experts": "expert"})
    run = replace(RUN, model=model, data=Batches(batch, batch), optim=SGD(lr=0.1), mesh=Mesh(dp=4, ep=2), **changes)
    team = Team.of(run)
    agrees(team, 2e-5)
    assert {name.split(".")[3] for name in team.weights() if ".experts." in name} == {"1", "2"}
    if "expert_shadows" in changes:
        assert any(any(one.times) for one in report_of(2, 1.0, team.step(2), team.world).shadows)


def test_frozen_experts_that_replicas_begin_with_otherwise_are_named():
    made = itertools.count(1.0)

    def layers():
        mixture = Mixture()
        linear = mixture.experts[3][0]
        linear.bias = nn.Parameter(torch.full(linear.bias.shape, next(made)), requires_grad=False)
        return [mixture]

    model = Layers(layers, mse, plan={"layers.*.experts": "expert"})
    with pytest.raises(UnequalReplicasError, match="pp=0 dp=3 are not those of pp=0 dp=1"):
        Team.of(replace(RUN, model=model, data=Batches(batch, batch), optim=SGD(lr=0.1), mesh=Mesh(dp=4, ep=2)))


@pytest.mark.parametrize("mesh", [Mesh(dp=2, ep=2), Mesh(expert_actors=2)])
def test_own_experts_with_buffers_are_refused(mesh):
    experts = Layers(lambda: [nn.ModuleList([nn.BatchNorm1d(4)] * 2)], mse, plan={"layers.0": "expert"})
    told = rp.faults(replace(RUN, model=experts, data=Batches(batch, batch), mesh=mesh))
    assert any("the experts of layers.0 have buffers, which checkpoints have by replica" in one for one in told)


def mixtures():
    return [nn.Linear(4, 4), Mixture(), Mixture()]


def experts_of(team, rank):
    names = (name.split(".") for name in team.all[rank].holds() if name.startswith("blocks.0.mlp.experts."))
    return {int(parts[4]) for parts in names}


def test_the_layouts_of_the_notes():
    """The user's layouts on four actors with eight experts, and the groups whose gradients are summed."""
    eight = replace(RUN.model, moe=MoE(experts=8, top_k=2))
    first, second, rest = {0, 1, 2, 3}, {4, 5, 6, 7}, [{2 * i, 2 * i + 1} for i in range(4)]
    for mesh, held, sums in (
        (Mesh(dp=4, ep=2), [first, second, first, second], ((0, 2), (1, 3))),
        (Mesh(dp=2, tp=2, ep=2), [first, second, first, second], ((0, 2), (1, 3))),
        (Mesh(dp=4, ep=4), rest, ((0,), (1,), (2,), (3,))),
    ):
        team = Team.of(replace(RUN, mesh=mesh, model=eight))
        assert [experts_of(team, rank) for rank in range(4)] == held
        assert mesh.groups("edp") == sums


def test_a_layer_moves_four_all_to_alls_a_microbatch_and_no_expert_is_reduced_in_pure_ep():
    team = Team.of(replace(RUN, mesh=Mesh(dp=2, ep=2), zero=0))
    team.step()
    for ledger in team.ledger("ep"):
        assert ledger["all_to_all"][0] == 4 * RUN.model.layers * RUN.microbatches
        assert ledger.keys() == {"all_to_all", "all_gather"}  # the counts of rows are gathered
    assert team.ledger("edp") == [{}, {}]
    sent = [ledger["all_to_all"][1] for ledger in team.ledger("ep")]
    counts = [load.asked for result in team.step(1) for load in result.loads]
    rows = RUN.model.layers * RUN.microbatches * RUN.micro_batch_size * RUN.model.seq * RUN.model.moe.top_k
    assert sum(map(sum, counts)) == 2 * rows
    assert 0 < sum(sent) <= 2 * rows * 4 * RUN.model.hidden * 4  # 4 times the rows that go to another actor


def test_experts_that_no_other_actor_has_are_never_gathered():
    """As much is gathered then as on ranks that have no experts at all."""
    gathered = []
    for mesh in (Mesh(dp=2, ep=2), Mesh(dp=2, expert_actors=2)):
        team = Team.of(replace(RUN, mesh=mesh, zero=3))
        team.step()
        gathered.append(team.all[0].held().most["gathered"])
    assert gathered[0] == gathered[1] > 0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"mesh": Mesh(dp=3, ep=3)},
            "divide the 4 experts of a layer: set model.moe.experts to 3 or 6, or set",
        ),
        ({"mesh": Mesh(dp=2, ep=2), "model": recipe("gpt-tiny").model}, "the model has no experts to divide"),
        ({"mesh": Mesh(dp=2, ep=4)}, "mesh.ep is 4, which does not divide dp x cp = 2: use 2, say"),
        ({"mesh": Mesh(dp=4, shard=2, ep=2)}, "raypar has no experts on several actors with hybrid sharding yet"),
        ({"mesh": Mesh(dp=2, ep=2), "data_parallel": "parameter_server"}, "servers hold all weights of a replica"),
        ({"mesh": Mesh(dp=2, tp=2, ep=2, etp=3)}, "mesh.etp is 3: an expert has all 2 tensor ranks or one"),
        ({"mesh": Mesh(tp=2, etp=1)}, "an expert has all 2 tensor ranks: leave mesh.etp out, or set mesh.ep to 2"),
        ({"mesh": Mesh(dp=2, etp=2)}, "mesh.etp is 2, but with mesh.ep 1 an expert has all 1 tensor ranks: leave"),
        ({"mesh": Mesh(tp=4, ep=2)}, "no replicas sum their gradients: use 4, or set mesh.dp to 2"),
    ],
)
def test_experts_that_do_not_fit_are_told_with_what_would(changes, told):
    with pytest.raises(ConfigError) as error:
        check_run(replace(RUN, **changes))
    assert told in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": Mesh(expert_actors=2)},
        {"mesh": Mesh(dp=2, ep=2), "expert_order": {"blocks.1.mlp.experts": "1 0 2 3"}},
    ],
)
def test_too_few_numbers_of_experts_are_told_whatever_else_is_asked(changes):
    model = replace(RUN.model, moe=MoE(experts=(4,), top_k=2))
    (fault,) = rp.faults(replace(RUN, model=model, **changes))
    assert "model.moe.experts has 1 numbers, and 2 blocks have experts" in fault
