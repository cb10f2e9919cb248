"""Experts that are shadowed: when it pays, and that nothing else comes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.expert_parallel import shadowing
from raypar.actors.expert_parallel.shadowing import Shadowing
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Layers
from raypar.config.recipes import recipe
from raypar.reporting.report import report_of
from tests.support.expert_layouts import tilted
from tests.support.replicas import agrees
from tests.support.team import Team, batch, mse

TINY = recipe("moe-tiny")
MODEL = replace(TINY.model, layers=2, dropout=0.0)
RUN = replace(TINY, model=MODEL, microbatches=2, steps=2, seed=8, timeout=20.0, expert_shadows=2)
LAYOUTS = {
    "replicas": {"mesh": Mesh(dp=2, ep=2)},
    "two groups, zero 3": {"mesh": Mesh(dp=4, ep=2), "zero": 3},
    "on tensor ranks": {"mesh": Mesh(dp=2, tp=2, ep=4)},
    "tensor-parallel experts": {"mesh": Mesh(dp=2, tp=2, ep=2, etp=2)},
    "split backwards": {"mesh": Mesh(pp=2, dp=2, ep=2), "backward": "split"},
    "recomputation": {"mesh": Mesh(dp=2, ep=2), "recompute": "full"},
}


@pytest.fixture
def slow_products(monkeypatch):
    """Products so slow that to share out those of a popular expert always pays."""
    monkeypatch.setattr(shadowing, "FLOPS", 1e6)


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_shadows_change_no_numbers(layout, slow_products):
    team = Team.of(replace(RUN, **layout))
    with tilted("two experts"):
        agrees(team, 2e-5)
        report = report_of(2, 1.0, team.step(2), team.world)
    groups = team.run.mesh.inner // team.run.mesh.ep
    assert [one.layer for one in report.shadows] == ["blocks.0.mlp.experts", "blocks.1.mlp.experts"]
    for one in report.shadows:
        assert one.times == (2 * groups, 2 * groups, 0, 0), "in every microbatch of every group"
        assert 0 < one.having < one.without
    ledger = team.ledger("ep")
    assert all(moved["broadcast"][0] == moved["reduce"][0] * (2 if layout.get("recompute") else 1) for moved in ledger)


def test_all_experts_may_be_shadowed(slow_products):
    team = Team.of(replace(RUN, mesh=Mesh(dp=2, ep=2), expert_shadows=4, seed=9))
    with tilted("even"):
        agrees(team, 2e-5)
        reports = [report_of(step, 1.0, team.step(step), team.world) for step in (2, 3, 4)]
    assert (2, 2, 2, 2) in {one.times for report in reports for one in report.shadows}


def test_nothing_is_shadowed_where_it_does_not_pay():
    team = Team.of(replace(RUN, mesh=Mesh(dp=2, ep=2)))
    report = report_of(0, 1.0, team.step(), team.world)
    assert {one.times for one in report.shadows} == {(0, 0, 0, 0)}
    assert all(one.having == one.without for one in report.shadows)
    assert all("broadcast" not in moved for moved in team.ledger("ep"))


def test_the_prediction_is_that_of_the_slowest_actor():
    """Two actors with two experts each; a row takes 1 s of products, a token 1 s to travel, an expert 5 s."""
    flops, rate = int(shadowing.FLOPS), int(shadowing.BYTES)
    costs = Shadowing(4, weights=flops // 6, row_bytes=rate // 4, weight_bytes=5 * rate)
    asked = torch.tensor(
        [[[9, 1], [0, 2]], [[7, 0], [3, 0]]]
    )  # 17 rows at the first actor, of which 7 have come; 5 at the second
    assert costs.seconds(asked, ()) == pytest.approx(17 + 7, rel=1e-6)
    assert costs.seconds(asked, [0]) == pytest.approx(12 + 2 + 2 * 5, rel=1e-6)  # 10 and 5 + 7 rows, 2 travel
    choice = costs.choose(asked)
    assert (choice.slots, choice.without, choice.having) == ((), pytest.approx(24), pytest.approx(24))
    cheap = replace(costs, weight_bytes=4 * rate)
    assert cheap.choose(asked).slots == (0,)
    assert cheap.choose(asked).having == pytest.approx(22)
    assert replace(cheap, most=0).choose(asked).slots == ()


def test_mistakes_are_told():
    told = "\n".join(rp.faults(replace(RUN, mesh=Mesh(dp=2), tile=4, zero=3)))
    assert "expert_shadows is 2, but mesh.ep is 1, so no token travels: set expert_shadows to 0" in told
    why = "expert_shadows is 2, but experts in tiles are never whole on other actors"
    assert f"{why}: set expert_shadows to 0, or set tile to 1" in told
    uneven = Layers(lambda: [nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])], mse, plan={"layers.0": "expert"})
    told = "\n".join(rp.faults(replace(RUN, model=uneven, data=Batches(batch), mesh=Mesh(dp=2, ep=2))))
    assert "expert_shadows: the experts of layers.0 have other shapes than one another" in told
