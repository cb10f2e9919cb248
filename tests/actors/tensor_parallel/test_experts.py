"""Experts divided over tp, on threads, without Ray: what one plain process computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from raypar.actors.expert_parallel.experts import run_experts
from raypar.actors.specs.model import Llama
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.optim import AdamW
from tests.support.own_layers import team_of as own_team_of
from tests.support.team import Team
from tests.support.tensor_teams import TINY, agrees, longer

EXPERTS = [
    MoE(experts=4, normalise=True, alpha=0.1, z_loss=0.01),
    MoE(experts=3, top_k=1, gate="switch", capacity=1.0, residual=True, every=2, alpha=0.1),
    MoE(experts=4, gate="sigmoid", bias_rate=0.1, shared=1, width=10, alpha=0.1),
    MoE(experts=4, gate="softmax", capacity=0.75, loss="gshard", alpha=0.5),
]


def team_of(tp=1, pp=1, dp=1, cp=1, model=TINY, **changes):
    fields = {"data": longer, "optim": AdamW(lr=1e-2), "clip": 0.5, "steps": 2}
    return Team(None, pp, 2, dp=dp, tp=tp, cp=cp, model=replace(model, seq=8), **fields | changes)


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("moe", EXPERTS, ids=lambda moe: moe.gate + (" capacity" if moe.capacity else ""))
@pytest.mark.parametrize(("tp", "sequence"), [(2, False), (4, False), (2, True)])
def test_over_tp(moe, tp, sequence):
    agrees(team_of(tp, model=replace(TINY, moe=moe), sequence_parallel=sequence))


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective", ("selective", "full")])
def test_a_llama_over_tp_pp_and_dp(sequence, recompute):
    model = Llama(layers=2, hidden=16, heads=4, ffn=24, seq=8, vocab=11, moe=EXPERTS[0])
    agrees(team_of(2, 2, 2, model=model, sequence_parallel=sequence, recompute=recompute))


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("moe", EXPERTS, ids=lambda moe: moe.gate + (" capacity" if moe.capacity else ""))
@pytest.mark.parametrize(("context", "tp"), [("ring", 1), ("ulysses", 1), ("ring", 2)])
def test_over_cp(moe, context, tp):
    agrees(team_of(tp, cp=2, model=replace(TINY, moe=moe), context=context))


@pytest.mark.sampled
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_over_dp(zero):
    agrees(team_of(dp=2, model=replace(TINY, moe=EXPERTS[0]), zero=zero))


class OwnExperts(nn.Module):
    """A user's layer: three experts, of which the last one gets no token."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(3))

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        gates, chosen = self.router(x_TD)[:, :2].softmax(-1).topk(1)
        return x_BSD + run_experts(x_TD, self.experts, chosen, gates).view_as(x_BSD)


@pytest.mark.sampled
@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 1, 1), (2, 2, 2)])
def test_experts_of_a_plan(tp, pp, dp):
    plan = {"layers.*.experts.*.0": "column", "layers.*.experts.*.2": "row"}
    agrees(own_team_of(lambda: [nn.Linear(3, 8), OwnExperts(), OwnExperts(), nn.Linear(8, 4)], plan, tp, pp, dp))
