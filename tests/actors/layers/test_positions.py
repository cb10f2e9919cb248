"""Positions: the formulas of their papers, and what attention makes of them."""

from __future__ import annotations

import math
from functools import partial
from typing import get_args

import pytest
import torch

from raypar.actors.layers.positions import ALPHA, Alibi, Hierarchical, Rope, Sinusoidal, alibi_slopes, magnitude, speeds
from raypar.actors.models.build import build_model
from raypar.actors.sharding import Pieces
from raypar.actors.specs.model import GPT, Llama, RopeScaling, ScalingKind

EVERY = ("learned", "sinusoidal", "hierarchical", "rope", "alibi")


def made(spec, seed=0):
    model = build_model(spec, seed)
    return model.materialize(range(len(model.names)), seed)


def logits(layers, ids):
    for layer in layers:
        ids = layer(ids)
    return ids


@pytest.mark.parametrize("width", [6, 7])
def test_sinusoidal_is_the_formula_of_the_paper(width):
    table = Sinusoidal(9, width)(5, torch.empty(0))
    assert table.shape == (5, width)
    for at in range(5):
        for i in range(width):
            angle = at / 10_000 ** (2 * (i // 2) / width)
            assert table[at, i].item() == pytest.approx(math.cos(angle) if i % 2 else math.sin(angle), abs=1e-6)


def test_hierarchical_is_the_formula_of_its_author_and_begins_with_the_table_itself():
    module = Hierarchical(4, 3)
    with torch.no_grad():
        module.weight.normal_(generator=torch.Generator().manual_seed(1))
    p, table = module.weight, module(14)
    u = (p - ALPHA * p[0]) / (1 - ALPHA)
    assert table.shape == (14, 3)
    torch.testing.assert_close(table[:4], p)
    for at in range(14):
        torch.testing.assert_close(table[at], ALPHA * u[at // 4] + (1 - ALPHA) * u[at % 4])
    assert torch.equal(module(3), table[:3])
    assert len({tuple(row.tolist()) for row in table}) == 14


@pytest.mark.parametrize(("seq", "rows"), [(1, 1), (16, 4), (17, 5)])
def test_a_hierarchical_table_has_the_root_of_the_rows(seq, rows):
    embed, *_ = made(GPT(layers=1, hidden=8, heads=2, seq=seq, positions="hierarchical"))
    assert len(embed.positions.weight) == rows


def test_rope_turns_pairs_so_that_a_product_depends_on_the_distance_only():
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    rope = Rope(12, 8, 100.0)
    turned_q, turned_k = (rope.turn(x.expand(1, 1, 12, 8), Pieces())[0, 0] for x in (q, k))
    products = turned_q @ turned_k.T
    for distance in range(-11, 12):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)
    turned = torch.view_as_complex(torch.stack((q[:4], q[4:]), -1)) * torch.exp(
        1j * 7 * 100.0 ** (-torch.arange(4) / 4)
    )
    torch.testing.assert_close(turned_q[7], torch.cat((turned.real, turned.imag)))


def by_halves(x):
    """What ``turn`` computes, from the two halves of the vectors."""
    angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * speeds(x.shape[3], 100.0)
    one, other = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_token", [True, False])
def test_vectors_and_gradients_are_turned_with_the_bits_of_the_halves_formula(by_token, dtype):
    rope, generator = Rope(12, 8, 100.0), torch.Generator().manual_seed(0)
    x, gradient = torch.randn(2, 2, 9, 3, 8, generator=generator).to(dtype).transpose(2, 3)
    x, gradient = (one if by_token else one.contiguous() for one in (x, gradient))
    found = []
    for turn in (partial(rope.turn, tokens=Pieces()), by_halves):
        leaf = x.detach().requires_grad_()
        turned = turn(leaf)
        found.append((turned.detach(), *torch.autograd.grad(turned, leaf, gradient)))
    for one, wanted in zip(*found, strict=True):
        assert torch.equal(one, wanted)
        assert one.dtype == dtype
    assert found[0][0].stride() == found[1][0].stride(), "products of other layouts have other bits"
    assert found[0][1].transpose(1, 2).is_contiguous(), "the projections read all heads of a token"


def test_gradients_of_gradients_are_turned_too():
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: Rope(3, 4, 100.0).turn(x.sin(), Pieces()), x)


def test_in_float64_every_formula_has_all_its_digits():
    x = torch.randn(1, 2, 300, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    angles = torch.arange(300, dtype=torch.float64)[:, None] * 1e4 ** (-torch.arange(8, dtype=torch.float64) / 8)
    turned = torch.complex(x[..., :8], x[..., 8:]) * torch.exp(1j * angles)
    exact = {"atol": 1e-14, "rtol": 1e-14}
    found = Rope(512, 16, 1e4).turn(x, Pieces())
    torch.testing.assert_close(found, torch.cat((turned.real, turned.imag), -1), **exact)
    table = Sinusoidal(400, 16)(300, x)
    torch.testing.assert_close(table, torch.stack((angles.sin(), angles.cos()), -1).flatten(1), **exact)
    module = Hierarchical(20, 3).double()
    with torch.no_grad():
        module.weight.normal_(generator=torch.Generator().manual_seed(1))
    u = (module.weight - ALPHA * module.weight[0]) / (1 - ALPHA)
    rows = torch.stack([ALPHA * u[at // 20] + (1 - ALPHA) * u[at % 20] for at in range(300)])
    torch.testing.assert_close(module(300), rows, **exact)
    distance = torch.arange(300, dtype=torch.float64)[:, None] - torch.arange(300)
    bias = -torch.tensor(alibi_slopes(4), dtype=torch.float64)[:, None, None] * distance
    torch.testing.assert_close(Alibi(4, 400).bias(300, x), bias.masked_fill(distance < 0, -math.inf), **exact)


def test_vectors_at_positions_of_their_own_are_turned_as_in_whole_sequences():
    x, rope = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(0)), Rope(9, 8, 100.0)
    whole = rope.turn(x, Pieces())
    for at in (torch.tensor([2, 7]), torch.tensor([3, 8])):
        picked, wanted = (torch.stack([one[row, :, place] for row, place in enumerate(at)]) for one in (x, whole))
        for _ in range(2):  # queries, then keys
            assert torch.equal(rope.turn_at(picked[:, :, None], at)[:, :, 0], wanted)


def test_the_slopes_of_alibi_are_those_of_its_authors():
    assert alibi_slopes(8) == [2.0**-k for k in range(1, 9)]
    assert alibi_slopes(1) == [2.0**-8]
    assert alibi_slopes(6) == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    for heads in range(1, 40):
        slopes = alibi_slopes(heads)
        assert len(set(slopes)) == heads
        assert all(0 < slope < 1 for slope in slopes)


def test_the_bias_of_alibi_is_the_distance_times_the_slope():
    bias = Alibi(2, 5).bias(3, torch.empty(0))
    inf = math.inf
    wanted = torch.tensor([[0, -inf, -inf], [-1, 0, -inf], [-2, -1, 0]])
    assert torch.equal(bias, torch.stack((wanted / 16, wanted / 256)))


@pytest.mark.parametrize("positions", EVERY)
@pytest.mark.parametrize("kind", [GPT, Llama])
def test_every_kind_of_positions_tells_the_order_of_tokens_and_nothing_of_what_comes(kind, positions):
    layers = made(kind(layers=1, hidden=16, heads=4, seq=12, vocab=20, positions=positions))
    with torch.no_grad():
        layers[1].attn.q.weight.mul_(50)
        layers[1].attn.k.weight.mul_(50)
    ids = torch.randint(20, (2, 12), generator=torch.Generator().manual_seed(3))
    out = logits(layers, ids)
    swapped = ids[:, [1, 0, *range(2, 12)]]
    moved = (logits(layers, swapped)[:, 2:] - out[:, 2:]).abs().max()
    assert moved > 1e-5, "but for the positions one block sees a set"
    assert torch.allclose(logits(layers, ids[:, :7]), out[:, :7], atol=1e-6), "a shorter sequence is a beginning"
    parameters = [name for name, _ in layers[0].named_parameters()]
    assert parameters == ["tokens.weight", *(["positions.weight"] if positions in ("learned", "hierarchical") else [])]
    assert not any(layer.state_dict().keys() - dict(layer.named_parameters()).keys() for layer in layers)


@pytest.mark.parametrize("positions", EVERY)
def test_a_sequence_beyond_the_models_is_refused(positions):
    layers = made(GPT(layers=1, hidden=8, heads=2, seq=4, vocab=5, positions=positions))
    with pytest.raises(ValueError, match="a sequence has 5 tokens, but the model's seq is 4: set it to 5"):
        layers[0](torch.zeros(1, 5, dtype=torch.int64))


@pytest.mark.parametrize(("scaling", "tables"), [(None, 1), (RopeScaling("dynamic", 2.0, trained=8), 2)])
def test_angles_are_computed_once_and_dynamic_ones_for_each_length(scaling, tables, monkeypatch):
    lengths = []
    monkeypatch.setattr(
        "raypar.actors.layers.positions.speeds", lambda *args: lengths.append(args[-1]) or speeds(*args)
    )
    rope = Rope(32, 8, 100.0, scaling)
    for length in (32, 32, 12, 12):
        rope.turn(torch.ones(1, 1, length, 8), Pieces())
    assert lengths == [32, 12][:tables]


@pytest.mark.parametrize("positions", ["rope", "alibi"])
def test_the_blocks_of_an_actor_share_one_table(positions):
    _, *blocks, _ = made(GPT(layers=3, hidden=8, heads=2, seq=4, positions=positions))
    held = {id(block.attn._rope or block.attn.core.alibi) for block in blocks}
    assert len(held) == 1


def scaled_by_hand(kind, i, d, base, factor, trained, length):
    """The angle per token of pair i, written from the papers' formulas."""
    plain = base ** (-2 * i / d)
    turns = trained * plain / (2 * math.pi)
    if kind == "linear":
        return plain / factor
    if kind == "dynamic":
        longer = factor * length / trained - (factor - 1)
        return (base * longer ** (d / (d - 2))) ** (-2 * i / d)
    if kind == "llama3":
        share = min(1.0, max(0.0, (turns - 1) / (4 - 1)))
    else:  # of 32 turns and 1 turn, the pairs that have them, rounded outwards
        first, last = (d * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base)) for times in (32, 1))
        first, last = max(math.floor(first), 0), min(math.ceil(last), d - 1)
        share = 1 - min(1.0, max(0.0, (i - first) / (last - first)))
    return share * plain + (1 - share) * plain / factor


@pytest.mark.parametrize("kind", get_args(ScalingKind))
def test_scaled_angles_are_the_formulas_of_the_papers(kind):
    scaling = RopeScaling(kind, factor=4.0, trained=256)
    for width, length in ((16, 300), (64, 1024)):
        wanted = [scaled_by_hand(kind, i, width, 10_000.0, 4.0, 256, length) for i in range(width // 2)]
        assert speeds(width, 10_000.0, scaling, length).tolist() == pytest.approx(wanted, rel=1e-12)
    assert magnitude(scaling) == (pytest.approx(0.1 * math.log(4) + 1) if kind == "yarn" else 1.0)
    x = torch.randn(1, 1, 300, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = Rope(512, 16, 10_000.0, scaling).turn(x, Pieces())
    assert turned.norm().item() == pytest.approx(x.norm().item() * magnitude(scaling), rel=1e-5)
    angle = 299 * scaled_by_hand(kind, 3, 16, 10_000.0, 4.0, 256, 300)
    one, other = x[0, 0, 299, 3].item(), x[0, 0, 299, 11].item()
    found = (one * math.cos(angle) - other * math.sin(angle)) * magnitude(scaling)
    assert turned[0, 0, 299, 3].item() == pytest.approx(found, abs=1e-6)


def test_short_sequences_have_the_plain_angles_of_a_dynamic_scaling():
    scaling = RopeScaling("dynamic", factor=4.0, trained=256)
    assert torch.equal(speeds(16, 10_000.0, scaling, 256), speeds(16, 10_000.0))


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"positions": "learned", "rope_scaling": RopeScaling()}, "set positions to 'rope', or leave rope_scaling out"),
        ({"rope_scaling": RopeScaling("yarn", 2.0)}, "give the most tokens in a sequence of the earlier training"),
        ({"rope_scaling": RopeScaling("llama3", 2.0, 64, low=4.0)}, "low must be less than high, as 1 and 4"),
        ({"rope_scaling": RopeScaling("yarn", 2.0, 64, fast=1.0)}, "slow must be less than fast, as 1 and 32"),
    ],
)
def test_scalings_that_can_not_be(model, told):
    (fault,) = Llama(**model).faults(lambda *paths: True)
    assert told in fault
