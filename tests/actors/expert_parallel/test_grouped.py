"""Experts whose products are grouped compute what they compute one by one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.expert_parallel.experts import run_experts
from raypar.actors.expert_parallel.grouped import run_grouped
from raypar.actors.layers.documents import Documents
from raypar.actors.models.mlp import MLP, are_groupable, grouped_mlps
from raypar.actors.models.moe import MixtureOfExperts

GATED = rp.Llama(layers=1, hidden=16, heads=2, ffn=24)
SPECS = {"with gates": GATED, "with biases": rp.GPT(layers=1, hidden=16, heads=2)}


def some(spec, experts, tokens, choices, dtype, drops):
    """Experts, tokens and choices, of which some are dropped; one expert has no token."""
    torch.manual_seed(7)
    mlps = nn.ModuleList(MLP(spec, nn.Linear, 24) for _ in range(experts)).to(dtype)
    x = torch.randn(tokens, 16).to(dtype).requires_grad_()
    chosen = torch.stack([torch.randperm(experts - 1)[:choices] for _ in range(tokens)])
    if drops:
        chosen[torch.rand(tokens, choices) < 0.3] = -1
        chosen[2] = -1
    return mlps, x, chosen, torch.rand(tokens, choices).requires_grad_()


def results(out, mlps, x, gates):
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype))
    return [out, x.grad, gates.grad, *(one.grad for one in mlps.parameters())]


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_outputs_have_the_same_bits_and_gradients_are_close(spec, drops):
    found = []
    for grouped in (False, True):
        mlps, x, chosen, gates = some(spec, 5, 13, 2, torch.float32, drops)
        compute = partial(grouped_mlps, [*mlps])
        out = (
            run_grouped(x, chosen, gates, len(mlps), compute, may_drop=drops)
            if grouped
            else run_experts(x, mlps, chosen, gates)
        )
        found.append(results(out, mlps, x, gates))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for at in (0, 1):
        assert torch.equal(found[0][at], found[1][at])


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_no_product_writes_goes_nowhere(spec, monkeypatch):
    """Kernels leave the rows of dropped choices, and their gradients, as the memory was."""

    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, ends):
            ctx.end = int(ends[-1])
            return torch.cat([x[: ctx.end], torch.full_like(x[ctx.end :], torch.nan)])

        @staticmethod
        def backward(ctx, gradient):
            return torch.cat([gradient[: ctx.end], torch.full_like(gradient[ctx.end :], torch.nan)]), None

    grouped = torch.nn.functional.grouped_mm

    def careless(x, weights, offs):
        return Careless.apply(grouped(Careless.apply(x, offs), weights, offs=offs), offs)

    mlps, x, chosen, gates = some(spec, 5, 13, 2, torch.float32, True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", careless)
    out = run_grouped(x, chosen, gates, len(mlps), partial(grouped_mlps, [*mlps]), may_drop=True)
    assert all(one.isfinite().all() for one in results(out, mlps, x, gates))
    assert not out[2].any() and not x.grad[2].any(), "all choices of this token were dropped"


def test_a_cpu_computes_experts_one_by_one_whatever_the_dtype():
    mlps, x, *_ = some(GATED, 3, 4, 1, torch.bfloat16, False)
    assert not are_groupable([*mlps], x)


class Elsewhere:
    """Tokens of which only the device is asked."""

    def __init__(self, dtype=torch.bfloat16):
        self.device, self.dtype = torch.device("cuda"), dtype


@pytest.mark.parametrize(
    ("change", "is_so"),
    [
        (lambda mlps: None, True),
        (lambda mlps: mlps[1].up.register_forward_hook(lambda *_: None), False),
        (lambda mlps: mlps[1].register_forward_hook(lambda *_: None), False),
        (lambda mlps: setattr(mlps[1], "down", nn.Sequential(mlps[1].down)), False),
        (lambda mlps: mlps.append(nn.Linear(16, 16)), False),
    ],
    ids=["plain", "hook of a layer", "hook", "tiles", "another module"],
)
def test_experts_are_grouped_where_all_are_plain(change, is_so):
    mlps, *_ = some(GATED, 3, 4, 1, torch.bfloat16, False)
    change(mlps)
    assert are_groupable([*mlps], Elsewhere()) == is_so
    assert not are_groupable([*mlps], Elsewhere(torch.float16))


def test_widths_are_such_as_kernels_take():
    mlps = [MLP(GATED, nn.Linear, width) for width in (20, 20)]
    assert not are_groupable(mlps, Elsewhere())


@pytest.mark.parametrize("moe", [rp.MoE(experts=4, top_k=2), rp.MoE(experts=4, capacity=1.0, gate="switch", top_k=1)])
def test_a_block_s_experts_are_grouped_alike(moe, monkeypatch):
    spec = rp.Llama(layers=1, hidden=16, heads=2, ffn=24, moe=moe)
    outs = []
    for grouped in (False, True):
        torch.manual_seed(3)
        block = some_block(spec)
        monkeypatch.setattr("raypar.actors.models.moe.are_groupable", lambda mlps, x, grouped=grouped: grouped)
        x = torch.randn(2, 6, 16, requires_grad=True)
        y = block(x)
        y.backward(torch.ones_like(y))
        outs.append((y, x.grad, block.router.weight.grad))
    for one, other in zip(*outs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def some_block(spec):
    return MixtureOfExperts(spec, 4, partial(MLP, spec, nn.Linear), Documents(), None, 0)
