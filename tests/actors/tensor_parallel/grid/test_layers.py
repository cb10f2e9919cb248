"""Layers divided over a grid are the dense layer: values, gradients (gradcheck), and what they send."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raypar.actors.collective import autograd as ops
from raypar.actors.tensor_parallel.grid.base import NormOfShard
from raypar.actors.tensor_parallel.grid.cube import CubeLinear
from raypar.actors.tensor_parallel.grid.summa import SummaLinear
from raypar.actors.tensor_parallel.linear import VocabParallelEmbedding
from raypar.actors.tensor_parallel.sequence import Gathering
from tests.support.on_grid import OnGrid, cut_on, groups_on
from tests.support.threads import in_threads


def called(layer, weights, *inputs):
    return torch.func.functional_call(layer, weights, inputs)


def summa(groups, x, weight, bias):
    """Of five outputs and four inputs, or as many as a test has."""
    whole = x.shape[-1] * groups["tp.row"].size
    cut = cut_on(groups, (5, whole), {0: "col", 1: "row"})
    layer = SummaLinear(nn.Linear(whole, 5), cut, groups["tp.row"], groups["tp.col"])
    return called(layer, {"weight": weight, "bias": bias}, x)


def cube(groups, x, weight, bias, into, out):
    """``into`` and ``out`` are the axes of the inputs' and of the outputs' features."""
    cuts = cut_on(groups, (5, 4), {0: out, 1: f"{into} x"}), cut_on(groups, (5,), {0: out})
    layer = CubeLinear(nn.Linear(4, 5), *cuts, inputs=groups[f"tp.{into}"], weights=groups["tp.x"])
    Gathering(groups[f"tp.{out}"], dim=0).attach(layer)
    return called(layer, {"weight": weight, "bias": bias}, x)


def norm(groups, x, weight, bias=None):
    whole = nn.RMSNorm(6, eps=1e-5) if bias is None else nn.LayerNorm(6)
    layer = NormOfShard(whole, cut_on(groups, (6,), {0: "row"}), groups["tp.row"])
    return called(layer, {"weight": weight} | ({} if bias is None else {"bias": bias}), x)


def embedding(groups, ids, table):
    cut = cut_on(groups, (5, 4), {0: "y", 1: "z x"})
    leave = partial(ops.reduce_scatter, group=groups["tp.y"], dim=0)
    layer = VocabParallelEmbedding(nn.Embedding(5, 4), cut, leave, partial(ops.all_gather, group=groups["tp.x"], dim=1))
    return called(layer, {"weight": table}, ids)


def random(*shape):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    ).requires_grad_()


def square_linear(spelling, samples, inputs):
    """Five outputs, so that shares differ."""
    x, w, b, y = {0: "depth col", 2: "row"}, {0: "col", 1: "row"}, {0: "row"}, {0: "depth col", 2: "row"}
    tensors = random(samples, 1, inputs), random(5, inputs), random(5)
    return spelling, summa, (x, w, b), ((samples, 1, 5), y), tensors, F.linear


def cube_linear(into, out):
    x, w, b, y = {0: f"x {out}", 2: into}, {0: out, 1: f"{into} x"}, {0: out}, {0: f"x {into}", 2: out}
    tensors = random(4, 1, 4), random(5, 4), random(5)
    return "3d:2x2x2", partial(cube, into=into, out=out), (x, w, b), ((4, 1, 5), y), tensors, F.linear


def any_norm(spelling, *weights, plain):
    x, each = {0: "col", 2: "row"}, {0: "row"}
    return spelling, norm, (x, *(each for _ in weights)), ((6, 1, 6), x), (random(6, 1, 6), *weights), plain


def rms(x, weight):
    return F.rms_norm(x, (6,), weight, 1e-5)


def layer_norm(x, weight, bias):
    return F.layer_norm(x, (6,), weight, bias)


CASES = {  # grid, work, ins, out, inputs, the plain function
    "2d:2x2 linear": square_linear("2d:2x2", 4, 4),
    "2d:3x3 linear": square_linear("2d:3x3", 3, 3),
    "2.5d:2x2x1 linear": square_linear("2.5d:2x2x1", 4, 4),
    "2.5d:2x2x2 linear": square_linear("2.5d:2x2x2", 4, 2),
    "3d linear": cube_linear("z", "y"),
    "3d linear back": cube_linear("y", "z"),
    "3d embedding": (
        "3d:2x2x2", embedding, ({0: "x"}, {0: "y", 1: "z x"}), ((4, 1, 4), {0: "x y", 2: "z"}),
        (torch.tensor([[4], [0], [2], [2]]), random(5, 4)), F.embedding,
    ),
    "2d:2x2 RMSNorm": any_norm("2d:2x2", random(6), plain=rms),
    "2d:3x3 LayerNorm": any_norm("2d:3x3", random(6), random(1, 6)[0].detach().requires_grad_(), plain=layer_norm),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_finite_differences(case):
    spelling, work, ins, out, inputs, _ = CASES[case]
    assert torch.autograd.gradcheck(lambda *x: OnGrid.apply(work, spelling, ins, out, *x), inputs, fast_mode=True)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_together_they_are_the_dense_layer(case, dtype):
    spelling, work, ins, out, inputs, plain = CASES[case]
    leaves = [x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x for x in inputs]
    ours, theirs = OnGrid.apply(work, spelling, ins, out, *leaves), plain(*leaves)
    bound = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(ours, theirs, **bound)
    floating, seed = [x for x in leaves if x.is_floating_point()], torch.linspace(-1, 1, theirs.numel(), dtype=dtype)
    found, wanted = (torch.autograd.grad(one, floating, seed.view_as(one)) for one in (ours, theirs))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **bound)


def test_a_mean_far_from_zero_costs_no_digits():
    """In fp32 the mean of squares less the square of the mean would be noise."""
    x = random(6, 1, 6).detach().float() + 1e4
    spelling, work, ins, out, (_, *weights), plain = CASES["2d:3x3 LayerNorm"]
    weights = [weight.detach().float() for weight in weights]
    torch.testing.assert_close(
        OnGrid.apply(work, spelling, ins, out, x, *weights), plain(x, *weights), rtol=1e-2, atol=1e-2
    )


def moved(spelling, work, *shapes):
    """Bytes that a member sends by axis and op: of the forward, and of the backward."""

    def counts(groups):
        entries = [entry for key, group in groups.items() for entry in group.ledger.entries().items()]
        return {(axis, op): entry.bytes for (axis, op), entry in entries}

    def one(groups):
        parts = [torch.ones(shape, requires_grad=True) for shape in shapes]
        made = work(groups, *parts)
        between = counts(groups)
        made.sum().backward()
        after = counts(groups)
        return between, {
            key: count - between.get(key, 0) for key, count in after.items() if count > between.get(key, 0)
        }

    first, *others = in_threads(groups_on(spelling), one)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("q", [2, 3])
def test_a_square_linear_sends_each_block_to_q_minus_1_others(q):
    """Forward: the weights along the column, products along the row. Backward: gradients along the row, weights and
    their gradients along the column."""

    def linear(groups, x, weight):
        layer = SummaLinear(
            nn.Linear(4 * q, 2 * q, bias=False), cut_on(groups, (2 * q, 4 * q), {0: "col", 1: "row"}),
            groups["tp.row"], groups["tp.col"],
        )  # fmt: skip
        return called(layer, {"weight": weight}, x)

    forward, backward = moved(f"2d:{q}x{q}", linear, (5, 3, 4), (2, 4))
    out, weight = 5 * 3 * 2 * 4, 2 * 4 * 4  # bytes of a block
    assert forward == {("tp.row", "reduce"): (q - 1) * out, ("tp.col", "broadcast"): (q - 1) * weight}
    assert backward == {
        ("tp.row", "broadcast"): (q - 1) * out,
        ("tp.col", "broadcast"): (q - 1) * weight,
        ("tp.col", "reduce"): (q - 1) * weight,
    }


def test_a_cube_linear_gathers_inputs_and_weights_and_scatters_outputs():
    forward, backward = moved("3d:2x2x2", partial(cube_without_bias, into="y", out="z"), (2, 3, 4), (6, 2))
    x, weight, out = (
        2 * 3 * 4 * 4,
        6 * 2 * 4,
        2 * 3 * 6 * 4,
    )  # bytes of what is here; of what another has there are as many
    assert forward == {
        ("tp.z", "all_gather"): x,
        ("tp.x", "all_gather"): weight,
        ("tp.y", "reduce_scatter"): out,
    }
    assert backward == {
        ("tp.y", "all_gather"): out,
        ("tp.x", "all_gather"): weight,
        ("tp.x", "reduce_scatter"): weight,
        ("tp.z", "reduce_scatter"): x,
    }


def cube_without_bias(groups, x, weight, into, out):
    cut = cut_on(groups, (12, 8), {0: out, 1: f"{into} x"})
    layer = CubeLinear(nn.Linear(8, 12, bias=False), cut, None, inputs=groups[f"tp.{into}"], weights=groups["tp.x"])
    Gathering(groups[f"tp.{out}"], dim=0).attach(layer)
    return called(layer, {"weight": weight}, x)


@pytest.mark.parametrize(("kind", "numbers"), [("RMSNorm", 1), ("LayerNorm", 2)])
def test_a_norm_sends_a_number_or_two_a_token_each_way(kind, numbers):
    q, tokens, weights = 3, 5, [(2,)] * numbers
    forward, backward = moved("2d:3x3", norm, (tokens, 2), *weights)
    assert forward == {("tp.row", "all_gather"): (q - 1) * numbers * tokens * 4}
    assert backward == {("tp.row", "all_reduce"): 2 * (q - 1) * numbers * tokens * 4 // q}
