"""The Llama family, held against its formulas written down once more, plainly."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from raypar.actors.models.build import build_model
from raypar.actors.models.partition import transformer_costs
from raypar.actors.specs.model import GPT, Llama

TINY = Llama(layers=2, hidden=24, heads=4, kv_heads=2, ffn=20, seq=10, vocab=30, norm_eps=1e-3, rope_base=50.0)


def made(spec, layers=None):
    model = build_model(spec, 0)
    return model, model.materialize(range(len(model.names)) if layers is None else layers, 0)


def weights(model, layers):
    return {
        f"{name}.{inner}": parameter
        for name, layer in zip(model.names, layers, strict=True)
        for inner, parameter in layer.named_parameters()
    }


def norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x, base):
    """Every head's vectors (..., S, d) as complex numbers, turned by position x base^(-2i/d)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * base ** (-torch.arange(half) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(()), angles)
    return torch.cat((z.real, z.imag), -1)


def plainly(w, spec, ids):
    """Touvron et al. 2023: the whole model as one function of its weights."""
    x = w["embed.tokens.weight"][ids]
    B, S, D = x.shape
    d = D // spec.heads
    later = torch.full((S, S), float("-inf")).triu(1)
    for i in range(spec.layers):
        at = f"blocks.{i}."
        y = norm(x, w[at + "norm1.weight"], spec.norm_eps)
        q, k, v = ((y @ w[f"{at}attn.{n}.weight"].T).view(B, S, -1, d).transpose(1, 2) for n in "qkv")
        q, k = turned(q, spec.rope_base), turned(k, spec.rope_base)
        k, v = (z.repeat_interleave(spec.heads // spec.num_kv_heads, dim=1) for z in (k, v))
        y = ((q @ k.mT) / d**0.5 + later).softmax(-1) @ v
        x = x + y.transpose(1, 2).reshape(B, S, D) @ w[at + "attn.out.weight"].T
        y = norm(x, w[at + "norm2.weight"], spec.norm_eps)
        gate, up, down = (w[f"{at}mlp.{n}.weight"] for n in ("gate", "up", "down"))
        g = y @ gate.T
        x = x + (g * torch.sigmoid(g) * (y @ up.T)) @ down.T
    return norm(x, w["head.norm.weight"], spec.norm_eps) @ w["head.out.weight"].T


@pytest.mark.parametrize("attention", ["fused", "materialised"])
@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_outputs_and_gradients_are_those_of_the_formulas(kv_heads, attention):
    spec = Llama(**{**vars(TINY), "kv_heads": kv_heads, "attention": attention})
    model, layers = made(spec)
    named = weights(model, layers)
    with torch.no_grad():  # of a size at which a mistake is seen
        for parameter in named.values():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) / 4)
    ids = torch.randint(spec.vocab, (3, spec.seq), generator=torch.Generator().manual_seed(1))
    out = ids
    for layer in layers:
        out = layer(out)
    wanted = plainly(named, spec, ids)
    assert out.std() > 0.5
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    loss = model.loss((out,), (ids,))
    theirs = torch.autograd.grad(torch.nn.functional.cross_entropy(wanted.flatten(0, 1), ids.flatten()), named.values())
    ours = torch.autograd.grad(loss, named.values())
    for name, one, other in zip(named, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, msg=name)


def test_names_and_shapes():
    model, layers = made(TINY)
    shapes = {name: tuple(parameter.shape) for name, parameter in weights(model, layers).items()}
    assert {name: shape for name, shape in shapes.items() if name.startswith("blocks.1.")} == {
        "blocks.1.norm1.weight": (24,),
        "blocks.1.norm2.weight": (24,),
        "blocks.1.attn.q.weight": (24, 24),
        "blocks.1.attn.k.weight": (12, 24),
        "blocks.1.attn.v.weight": (12, 24),
        "blocks.1.attn.out.weight": (24, 24),
        "blocks.1.mlp.gate.weight": (20, 24),
        "blocks.1.mlp.up.weight": (20, 24),
        "blocks.1.mlp.down.weight": (24, 20),
    }
    assert set(shapes) - {name for name in shapes if name.startswith("blocks.")} == {
        "embed.tokens.weight",
        "head.norm.weight",
        "head.out.weight",
    }
    assert tuple(model.parameter_names()) == tuple(shapes)


def test_a_weight_has_the_same_bits_whichever_other_layers_are_made():
    _, layers = made(TINY)
    _, part = made(TINY, [2])
    for one, other in zip(layers[2].parameters(), part[0].parameters(), strict=True):
        assert torch.equal(one, other)
    assert layers[2].mlp.down.weight.std().item() == pytest.approx(0.01, rel=0.1), "0.02 / sqrt(2 x layers)"
    assert layers[2].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_tied_model_has_one_weight_for_embedding_and_head():
    model, layers = made(Llama(**{**vars(TINY), "tied": True}))
    assert torch.equal(layers[0].tokens.weight, layers[-1].out.weight)
    assert "head.out.weight" not in model.parameter_names()


def test_the_default_mlp_has_about_as_many_weights_as_a_gpts():
    for hidden in (32, 256, 4096):
        assert Llama(hidden=hidden).mlp_width % 8 == 0
        assert 0 <= 3 * Llama(hidden=hidden).mlp_width - 2 * GPT(hidden=hidden).mlp_width < 24


@pytest.mark.parametrize("spec", [TINY, GPT(layers=2, hidden=24, heads=4, seq=10, vocab=30, mlp=3)])
def test_the_costs_are_the_flops_that_torch_counts(spec):
    _, layers = made(spec.__class__(**{**vars(spec), "attention": "materialised"}))
    ids = torch.zeros(2, 10, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        for layer in layers:
            ids = layer(ids)
    assert sum(transformer_costs(spec)) * 20 - 2 * spec.hidden * 20 == counter.get_total_flops()
