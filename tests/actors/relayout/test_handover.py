"""A run goes on in another layout with the state that actors hand over: losses are those of the undisturbed run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

import raypar as rp
from raypar.reporting.report import report_of
from tests.support.relayouts import relaid
from tests.support.team import Team, batch, mse

MODEL = rp.GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256)  # threads share the generator that dropout draws from
RUN = rp.Run(model=MODEL, mesh=rp.Mesh(pp=2), microbatches=4, steps=9, optim=rp.AdamW(lr=1e-2))
MOE = replace(MODEL, moe=rp.MoE(experts=4, top_k=2))


def loss(team, step):
    return report_of(step, 1.0, team.step(step), team.world).loss


def normed():
    return [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))]


CHAIN = (
    {"mesh": rp.Mesh(tp=2)},
    {"mesh": rp.Mesh(dp=2), "zero": 3, "microbatches": 2},
    {"mesh": rp.Mesh(pp=2, dp=2), "zero": None, "microbatches": 2},
    {"mesh": rp.Mesh(dp=2, ep=2), "microbatches": 2},
)


@pytest.mark.long
def test_a_chain_of_layouts_has_the_losses_of_one():
    team, undisturbed = Team.of(replace(RUN, model=MOE)), Team.of(replace(RUN, model=MOE))
    for step, changes in enumerate(({}, *CHAIN)):
        if changes:
            team, moves, _ = relaid(team, replace(team.run, **changes))
            assert any(move.is_sent for move in moves)
        assert loss(team, step) == pytest.approx(loss(undisturbed, step), rel=1e-5)


LONG, TWO = pytest.mark.long, {"mesh": rp.Mesh(dp=2), "microbatches": 2}
SERVED = {"data_parallel": "parameter_server", "servers": 2}
FEW, EP, ALONE = {"microbatches": 2}, {"mesh": rp.Mesh(dp=2, ep=2)}, {"mesh": rp.Mesh(), "microbatches": 4}
HYBRID = {"mesh": rp.Mesh(dp=4, shard=2), "microbatches": 1, "zero": 2}
NORMED = {"model": rp.Layers(normed, mse), "data": rp.Batches(batch)}
PAIRS = (
    pytest.param({}, {"schedule": "gpipe"}, id="schedule", marks=LONG),
    pytest.param({"optim": rp.SGD(lr=0.1, momentum=0.9)}, {"mesh": rp.Mesh(pp=1)}, id="alone", marks=LONG),
    pytest.param({"optim": rp.Muon(lr=1e-2)}, {"mesh": rp.Mesh(tp=2)}, id="muon", marks=LONG),
    pytest.param(TWO, {"zero": 2}, id="zero", marks=LONG),
    pytest.param(TWO, SERVED, id="to servers"),
    pytest.param(TWO | SERVED, {"data_parallel": "all_reduce", "servers": 1}, id="from servers"),
    pytest.param(
        {"mesh": rp.Mesh(cp=2)}, {"mesh": rp.Mesh(tp=2), "sequence_parallel": True}, id="sequence", marks=LONG
    ),
    pytest.param({"tile": 2}, {"tile": 1, "mesh": rp.Mesh(tp=2)}, id="tiles"),
    pytest.param(TWO | {"tile": 2, "zero": 3}, {"tile": 1}, id="tiles of zero 3", marks=LONG),
    pytest.param({"mesh": rp.Mesh(tp="2d:2x2")}, {"mesh": rp.Mesh(tp=2)}, id="grid"),
    pytest.param({"model": MOE, "mesh": rp.Mesh(dp=2, expert_actors=2)} | FEW, EP, id="expert actors", marks=LONG),
    pytest.param({"model": replace(MODEL, lora=rp.Lora(rank=2))}, {"mesh": rp.Mesh(tp=2)}, id="adapters", marks=LONG),
    pytest.param(
        {"mesh": rp.Mesh(pp=2, rank_tp=(2, 1))}, {"mesh": rp.Mesh(pp=2, rank_dp=(1, 2))}, id="uneven", marks=LONG
    ),
    pytest.param({"model": replace(MODEL, tied=True)}, {"mesh": rp.Mesh(tp=2)}, id="tied", marks=LONG),
    pytest.param(TWO | {"precision": rp.Precision(compute="fp16")}, ALONE, id="fp16", marks=LONG),
    pytest.param(HYBRID, TWO | {"zero": 3}, id="groups of shards", marks=LONG),
    pytest.param({"optim": rp.SGD(lr=0.1)} | NORMED, ALONE, id="running statistics"),
    pytest.param({"offload": "optimizer"}, TWO | {"offload": "none"}, id="offload"),
)


@pytest.mark.sampled
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_pairs(before, after):
    run = replace(RUN, **before)
    team, undisturbed = Team.of(run), Team.of(run)
    for step in range(2):
        loss(team, step), loss(undisturbed, step)
    team, _, _ = relaid(team, replace(run, **after))
    for step in range(2, 4):
        assert loss(team, step) == pytest.approx(loss(undisturbed, step), rel=1e-5)
