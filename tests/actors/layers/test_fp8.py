"""Products in fp8 are those of an emulation in float64 that shares no code with raypar, and parts those of a whole."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raypar.actors.collective import autograd as ops
from raypar.actors.layers import fp8
from raypar.actors.layers.fp8 import FP8, Fp8Linear, rounded, to_fp8
from raypar.actors.pipeline.weight_grad import DeferredFp8Linear, Linears
from raypar.actors.sharding import Pieces
from raypar.actors.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    SharedLinear,
    column_parallel,
    shard_of,
)
from tests.support.local_groups import local_groups
from tests.support.threads import in_threads

ROWS, IN, OUT = 24, 64, 32
HALF_A_STEP = 2.0**-8  # of a result in bf16


def random(*shape, seed=0):
    """Numbers of very different sizes, in bf16."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape, generator=generator).exp()
    return (torch.randn(shape, generator=generator) * sizes).bfloat16()


def e4m3(rows):
    """Rows (n, k) rounded to E4M3 with a scale each, in float64: 3 bits of a mantissa, exponents from -6."""
    rows = rows.double()
    scales = 2.0 ** (448.0 / rows.abs().amax(1, keepdim=True)).log2().floor()
    scaled = rows * scales
    step = 2.0 ** (scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (scaled / step).round() * step / scales


def wanted(x, weight, bias, gradient):
    """Output, and gradients of x, the weight and the bias, in float64."""
    out = e4m3(x) @ e4m3(weight).T + bias.double()
    inner = e4m3(gradient) @ e4m3(weight.T).T
    return out, inner, gradient.double().T @ x.double(), gradient.double().sum(0)


def made(layer, x, gradient):
    x = x.clone().requires_grad_()
    out = layer(x)
    inner, of_weight, of_bias = torch.autograd.grad(out, (x, layer.weight, layer.bias), gradient)
    return out.detach(), inner, of_weight, of_bias


def errors(layer):
    x, gradient = random(ROWS, IN), random(ROWS, OUT, seed=1)
    expected = wanted(x, layer.weight.detach(), layer.bias.detach(), gradient)
    pairs = zip(made(layer, x, gradient), expected, strict=True)
    return [float((one.double() - other).norm() / other.norm()) for one, other in pairs]


@pytest.fixture
def layer():
    made = Fp8Linear(IN, OUT, dtype=torch.bfloat16)
    with torch.no_grad():
        made.weight.copy_(random(OUT, IN, seed=2))
        made.bias.copy_(random(OUT, seed=3))
    return made


def test_the_products_are_those_of_an_emulation_in_float64(layer):
    assert max(errors(layer)) < HALF_A_STEP
    with torch.no_grad():
        x, weight = random(ROWS, IN), layer.weight
        plain = F.linear(x, weight).double()
        assert (e4m3(x) @ e4m3(weight).T - plain).norm() > 5 * HALF_A_STEP * plain.norm(), "fp8 is not bf16"


def _of_the_tensor(rows):
    scale = 448.0 / rows.abs().max().float()
    return (rows.float() * scale).to(torch.float8_e4m3fn), scale.reciprocal().expand(*rows.shape[:-1], 1)


def _twice(rows):
    values, factor = to_fp8(rows)
    return values, factor * 2.0


def _two_bits(rows):
    values, factor = to_fp8(rows)
    return values.float().to(torch.float8_e5m2), factor


@pytest.mark.parametrize("wrong", [_of_the_tensor, _twice, _two_bits])
def test_the_emulation_sees_a_wrong_scale_or_format(layer, wrong, monkeypatch):
    monkeypatch.setattr(fp8, "to_fp8", wrong)
    out, inner, of_weight, of_bias = errors(layer)
    assert min(out, inner) > 3 * HALF_A_STEP
    assert max(of_weight, of_bias) < HALF_A_STEP


def test_a_part_of_a_row_rounds_as_the_whole_row():
    """With the largest number of another part: but for numbers of less than 2^-13 of it, scales change nothing."""
    x = random(ROWS, IN)
    x[:, 0] *= 100
    halves = torch.cat([rounded(half) for half in x.split(IN // 2, 1)], 1)
    same = halves == rounded(x)
    assert same.float().mean() > 0.99
    assert (x.abs() <= x.abs().amax(1, keepdim=True) * 2.0**-13)[~same].all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_makes_outputs_that_are_not(bad):
    x = random(2, IN)
    x[1, 3] = bad
    out = FP8.linear(x, random(OUT, IN), None)
    assert out[0].isfinite().all()
    assert not out[1].isfinite().any()


def test_rows_of_zeros_of_tiny_numbers_and_no_rows():
    weight = random(OUT, IN)
    assert not FP8.linear(torch.zeros(2, IN).bfloat16(), weight, None).any()
    assert FP8.linear(torch.empty(0, IN).bfloat16(), weight, None).shape == (0, OUT)
    x = random(ROWS, IN)
    assert torch.equal(rounded(x * 2.0**-80), rounded(x) * 2.0**-80)
    assert torch.equal(rounded(torch.tensor([[2.0**127, 1.0]]).bfloat16())[0, 0].float(), torch.tensor(2.0**127))


def test_gradients_of_gradients_are_of_fp8_products_too(layer):
    x, rows = random(ROWS, IN).requires_grad_(), random(ROWS, OUT, seed=1).requires_grad_()
    (inner,) = torch.autograd.grad(layer(x), x, rows, create_graph=True)
    (again,) = torch.autograd.grad(inner.sum(), rows)
    assert torch.equal(again, FP8.linear(torch.ones_like(x), layer.weight, None))


@pytest.mark.parametrize("halves", [True, False])
def test_gradients_of_weights_later_or_in_given_memory_have_the_same_bits(layer, halves):
    x, gradient = random(ROWS, IN), random(ROWS, OUT, seed=1)
    expected = made(layer, x, gradient)
    linears = Linears([nn.Sequential(layer)])
    linears.take_over()
    linears.halve(halves)
    memory = torch.empty_like(layer.weight)
    linears.make_in({layer.weight: lambda: memory}, least=0)
    linears.begin()
    (module,) = linears.modules
    assert type(module[0]) is DeferredFp8Linear
    x = x.requires_grad_()
    out = module(x)
    with linears.postponed() as deferred:
        out.backward(gradient)
    deferred.compute(linears.memory)
    found = out.detach(), x.grad, layer.weight.grad, layer.bias.grad
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert layer.weight.grad.data_ptr() == memory.data_ptr()


def parts_of(layer, group, kind):
    """A member's output (rows, out) of a layer that is divided over a group, and its gradient of the input."""
    x, gradient = random(ROWS, IN).requires_grad_(), random(ROWS, OUT, seed=1)
    own = Pieces.at(group.rank, group.size)
    columns = own.take(gradient, 1)
    if kind == "row":
        part = RowParallelLinear(layer, shard_of((OUT, IN), 1, group), partial(ops.reduce_from, group=group))
        weights = {"weight": own.take(layer.weight, 1), "bias": layer.bias}
        out = torch.func.functional_call(part, weights, (own.take(x, 1),))
        (inner,) = torch.autograd.grad(out, x, gradient)
        return out, ops.reduce_from(inner, group)
    if kind == "shared":
        part, weights = SharedLinear(layer, own.span(OUT)), dict(layer.named_parameters())
        out = torch.func.functional_call(part, weights, (ops.copy_to(x, group),))
    elif kind == "column":
        part = ColumnParallelLinear(layer, shard_of((OUT, IN), 0, group))
        weights = {name: own.take(p, 0) for name, p in layer.named_parameters()}
        out = torch.func.functional_call(part, weights, (ops.copy_to(x, group),))
    else:
        (out,) = column_parallel(x, [(own.take(layer.weight, 0), own.take(layer.bias, 0))], group, None, [FP8])
    (inner,) = torch.autograd.grad(out, x, columns)
    return ops.gather_from(out, group, 1), inner


@pytest.mark.parametrize("kind", ["row", "column", "shared", "fan"])
def test_the_parts_of_a_layer_are_those_of_the_whole_one(layer, kind):
    out, inner, *_ = made(layer, random(ROWS, IN), random(ROWS, OUT, seed=1))
    groups = local_groups("tp", 2)
    for found in in_threads(groups, lambda group: parts_of(layer, group, kind)):
        for one, other in zip(found, (out, inner), strict=True):
            error = (one.double() - other.double()).norm() / other.double().norm()
            assert error < 2 * HALF_A_STEP, "two roundings to bf16, and no other of fp8"


def scaled_mm(left, right, of_left, kind, of_right, other_kind, *, bias, output_dtype, use_fast_accum):
    """What torch's kernel for GPUs takes and makes, in float32."""
    rows, inner, columns = *left.shape, right.shape[1]
    assert left.dtype == right.dtype == torch.float8_e4m3fn
    assert left.is_contiguous() and right.t().is_contiguous(), "the second factor is column-major"
    assert kind == other_kind == F.ScalingType.RowWise
    assert inner % 16 == columns % 16 == 0
    assert of_left.shape == (rows, 1) and of_right.shape == (1, columns) and use_fast_accum
    assert of_left.dtype == of_right.dtype == torch.float32 and of_right.is_contiguous()
    out = (left.float() @ right.float()) * of_left * of_right
    return (out if bias is None else out + bias.float()).to(output_dtype)


def test_a_gpus_kernel_gets_factors_and_scales_as_it_takes_them(layer, monkeypatch):
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    assert max(errors(layer)) < HALF_A_STEP
    x = random(2, 3, IN)
    assert FP8.linear(x, layer.weight, layer.bias).shape == (2, 3, OUT)
    assert FP8.linear(x[:0], layer.weight, layer.bias).shape == (0, 3, OUT)


def test_it_compiles_into_one_graph_with_the_same_bits(layer):
    x, gradient = random(ROWS, IN), random(ROWS, OUT, seed=1)
    expected = made(layer, x, gradient)
    layer.compile(backend="aot_eager", fullgraph=True)
    assert all(torch.equal(one, other) for one, other in zip(made(layer, x, gradient), expected, strict=True))
