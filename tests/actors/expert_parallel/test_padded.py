"""Rows that are padded to the capacity of an expert, so that no host reads how many there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.expert_parallel.experts import run_experts
from raypar.actors.expert_parallel.grouped import run_padded
from raypar.actors.expert_parallel.token_exchange import TokenExchange
from raypar.actors.specs.results import losses_of
from tests.actors.expert_parallel.test_grouped import GATED, some
from tests.support.team import Team

MODEL = rp.Llama(layers=2, hidden=16, heads=4, kv_heads=4, ffn=24, seq=8, vocab=32)
SWITCH = rp.MoE(experts=4, gate="switch", top_k=1, capacity=1.0)
TWO = rp.MoE(experts=4, top_k=2, capacity=0.7, bias_rate=0.01, z_loss=0.01)


def batch(step, microbatch, dp):
    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(100 * step + 10 * microbatch + dp))
    return ids[:, :-1], ids[:, 1:]


def trained(moe, **changes):
    fields = {"data": rp.Batches(batch), "microbatches": 2, "optim": rp.SGD(lr=0.5), "clip": None, "timeout": 20.0}
    team = Team.of(rp.Run(model=replace(MODEL, moe=moe), **fields | changes))
    results = [team.step(step) for step in range(3)]
    loads = [sorted(one.loads for one in step) for step in results]
    return [losses_of(step)[0] for step in results], loads, team.weights()


@pytest.mark.sampled
@pytest.mark.parametrize("moe", [SWITCH, TWO], ids=["one choice", "two choices"])
@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": rp.Mesh(dp=2, ep=2)},
        {"mesh": rp.Mesh(dp=4, ep=4)},
        {"mesh": rp.Mesh(dp=4, ep=2), "zero": 3},
        {"mesh": rp.Mesh(tp=2, ep=2)},
        {"mesh": rp.Mesh(dp=2, tp=2, ep=4)},
        {"mesh": rp.Mesh(dp=2, tp=2, ep=2, etp=2), "sequence_parallel": True},
        {"mesh": rp.Mesh(cp=2, ep=2)},
        {"mesh": rp.Mesh(pp=2, dp=2, ep=2), "backward": "split"},
        {"mesh": rp.Mesh(dp=2, ep=2), "recompute": "full"},
        {"mesh": rp.Mesh(dp=2, expert_actors=2)},
    ],
    ids=str,
)
def test_a_layout_learns_as_without_padding(changes, moe, monkeypatch):
    losses, loads, weights = trained(moe, **changes)
    monkeypatch.setattr("raypar.actors.models.moe.pads_rows", lambda x: True)
    found, others, theirs = trained(moe, **changes)
    assert others == loads
    for one, other in zip(found, losses, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(theirs[name], weight, rtol=1e-4, atol=1e-6)


def test_no_number_of_rows_is_exchanged(monkeypatch):
    monkeypatch.setattr("raypar.actors.models.moe.pads_rows", lambda x: True)

    def asked(self, counts, width):
        raise AssertionError("numbers of rows are exchanged")

    monkeypatch.setattr(TokenExchange, "_asked", asked)
    trained(TWO, mesh=rp.Mesh(dp=2, ep=2))
    with pytest.raises(Exception, match="numbers of rows are exchanged"):
        trained(replace(TWO, capacity=None), mesh=rp.Mesh(dp=2, ep=2))


@pytest.mark.parametrize("most", [6, 13])
def test_each_expert_computes_the_same_number_of_rows(most):
    found = []
    for padded in (False, True):
        mlps, x, chosen, gates = some(GATED, 5, 13, 2, torch.float32, True)
        for expert in range(5):
            is_it = chosen == expert
            chosen[is_it & (is_it.flatten().cumsum(0).view_as(is_it) > most)] = -1
        calls = []

        def compute(rows, mlps=mlps, calls=calls):
            parts = rows.view(5, -1, 16)
            calls.append(parts.shape[1])
            return torch.cat([mlp(part) for mlp, part in zip(mlps, parts, strict=True)])

        out = run_padded(x, chosen, gates, 5, most, compute) if padded else run_experts(x, mlps, chosen, gates)
        assert calls == [most] * padded
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        found.append([out, x.grad, gates.grad, *(one.grad for one in mlps.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_what_an_empty_row_becomes_reaches_nothing():
    """Experts with biases make something of zeros."""
    torch.manual_seed(3)
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    x, gates = torch.randn(2, 4, requires_grad=True), torch.ones(2, 1, requires_grad=True)
    out = run_padded(
        x,
        torch.tensor([[2], [-1]]),
        gates,
        3,
        2,
        lambda rows: torch.cat([e(r) for e, r in zip(experts, rows.split(2), strict=True)]),
    )
    out.sum().backward()
    assert (
        torch.equal(out[0], experts[2](x[0])) and not out[1].any() and not x.grad[1].any() and not gates.grad[1].any()
    )
    assert not experts[0].bias.grad.any() and torch.equal(experts[2].bias.grad, torch.ones(4))
