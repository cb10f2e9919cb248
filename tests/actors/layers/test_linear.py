"""Linear layers by oneDNN's products: what nn.Linear computes, and nn.Linear itself wherever oneDNN does not serve."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from raypar.actors.autograd import torch_private
from raypar.actors.layers import linear as processor
from raypar.actors.layers import linear as products
from raypar.actors.layers.linear import Linear, linear_of, of_intel, products_of
from raypar.actors.pipeline.weight_grad import Linears

ROWS, IN, OUT = (2, 256), 256, 512  # 2 ** 26 multiplications: the smallest product that oneDNN makes


def pair(inputs=IN, outputs=OUT, bias=True, dtype=torch.float32):
    """A layer, and nn.Linear of the same weights."""
    torch.manual_seed(0)
    ours = Linear(inputs, outputs, bias=bias, dtype=dtype)
    plain = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


def trained(layer, x, gradient):
    """Output, and gradients of the input and the parameters."""
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(gradient)
    return [out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("bias", [True, False])
def test_a_large_layer_computes_what_nn_linear_does_by_onednn(counted, bias):
    ours, plain = pair(bias=bias)
    x, gradient = torch.randn(*ROWS, IN), torch.randn(*ROWS, OUT)
    made, wanted = trained(ours, x, gradient), trained(plain, x, gradient)
    assert counted.calls == 2, "its output, and the gradient of its input"
    for one, other in zip(made, wanted, strict=True):
        assert one.shape == other.shape
        assert one.stride() == other.stride()
        assert (one - other).norm() < 1e-6 * other.norm()
    assert all(torch.equal(one, other) for one, other in zip(made[2:], wanted[2:], strict=True)), "torch makes those"


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "dtype"),
    [((2, 255), IN, OUT, torch.float32), ((8,), 4096, 4096, torch.float32), (ROWS, IN, OUT, torch.float64)],
    ids=["small", "few rows", "float64"],
)
def test_what_onednn_is_not_for_has_the_bits_of_nn_linear(counted, rows, inputs, outputs, dtype):
    ours, plain = pair(inputs, outputs, dtype=dtype)
    x, gradient = torch.randn(*rows, inputs, dtype=dtype), torch.randn(*rows, outputs, dtype=dtype)
    for one, other in zip(trained(ours, x, gradient), trained(plain, x, gradient), strict=True):
        assert torch.equal(one, other)
    assert counted.calls == 0


def test_without_onednn_it_is_nn_linear(monkeypatch):
    monkeypatch.setattr(torch_private, "_ONEDNN_LINEAR", None)
    ours, plain = pair()
    x, gradient = torch.randn(*ROWS, IN), torch.randn(*ROWS, OUT)
    for one, other in zip(trained(ours, x, gradient), trained(plain, x, gradient), strict=True):
        assert torch.equal(one, other)


def test_switched_off_it_is_nn_linear(counted):
    ours, plain = pair()
    x = torch.randn(*ROWS, IN)
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(ours(x), plain(x))
    assert counted.calls == 0


def forward_mode(layer, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


DISTURBED = {
    "autocast": lambda layer, x: torch.autocast("cpu", torch.bfloat16)(layer)(x),
    "vmap": lambda layer, x: torch.vmap(layer)(torch.stack([x, x])),
    "forward mode": forward_mode,
    "transposed": lambda layer, x: layer(x.transpose(0, 1).contiguous().transpose(0, 1)),
}


@pytest.mark.parametrize("disturbed", DISTURBED)
def test_what_torch_does_to_a_call_is_done(counted, disturbed):
    ours, plain = pair()
    x = torch.randn(*ROWS, IN)
    assert torch.equal(DISTURBED[disturbed](ours, x), DISTURBED[disturbed](plain, x))
    assert counted.calls == 0


def test_who_counts_flops_sees_them(counted):
    found = []
    for layer in pair():
        with FlopCounterMode(display=False) as flops:
            layer(torch.randn(*ROWS, IN)).sum().backward()
        found.append(flops.get_total_flops())
    assert found[0] == found[1] > 0


def test_it_can_be_compiled(counted):
    ours, plain = pair()
    x = torch.randn(*ROWS, IN)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), plain(x))


def test_gradients_of_gradients_are_those_of_nn_linear(counted):
    found = []
    for layer in pair():
        torch.manual_seed(1)
        x = torch.randn(*ROWS, IN).requires_grad_()
        (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [x, layer.weight]))
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize("gradient", [torch.ones(()).expand(*ROWS, OUT), torch.randn(ROWS[1], ROWS[0], OUT).mT.mT])
def test_a_gradient_may_be_laid_out_in_any_way(counted, gradient):
    gradient = gradient if gradient.shape[0] == ROWS[0] else gradient.transpose(0, 1)
    ours, plain = pair()
    x = torch.randn(*ROWS, IN)
    for one, other in zip(trained(ours, x, gradient), trained(plain, x, gradient), strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_bits_are_the_same_with_gradients_without_again_and_in_place(counted):
    ours, _ = pair()
    x = torch.randn(*ROWS, IN)
    wanted = ours(x).detach()
    with torch.no_grad():
        assert torch.equal(ours(x), wanted)
    assert torch.equal(checkpoint(ours, x, use_reentrant=False), wanted)
    assert torch.equal(torch.relu_(ours(x)), wanted.relu()), "its output may be written into"


@pytest.mark.parametrize("half", [True, False], ids=["halved", "placed"])
def test_a_layer_that_was_taken_over_has_the_bits_of_its_own(counted, half):
    whole, _ = pair()
    ours = deepcopy(whole)
    linears = Linears([ours])
    linears.take_over()
    linears.halve(half)
    if not half:
        linears.make_in({p: partial(torch.empty_like, p) for p in ours.parameters()}, least=0)
    linears.begin()
    (ours,) = linears.modules
    for _ in range(2):  # the second gradient adds to the first
        x, gradient = torch.randn(*ROWS, IN), torch.randn(*ROWS, OUT)
        mine = x.clone().requires_grad_()
        out = ours(mine)
        with linears.postponed() as deferred:
            out.backward(gradient)
        deferred.compute(linears.memory)
        made = [out.detach(), mine.grad, *(parameter.grad for parameter in ours.parameters())]
        for one, other in zip(made, trained(whole, x, gradient), strict=True):
            assert torch.equal(one, other)
    assert counted.calls == 8


@pytest.mark.parametrize(("intel", "best"), [(True, nn.Linear), (False, Linear)])
def test_the_processor_decides_where_nobody_else_does(monkeypatch, intel, best):
    monkeypatch.setattr(products, "of_intel", lambda: intel)
    assert linear_of("auto") is best
    assert linear_of("onednn") is Linear
    assert linear_of("torch") is nn.Linear


def test_the_processor_is_known_where_linux_tells_it(monkeypatch, tmp_path):
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "cpuinfo")
    assert not of_intel.__wrapped__(), "no Linux"
    for vendor, wanted in (("GenuineIntel", True), ("AuthenticAMD", False)):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: 6\n")
        assert of_intel.__wrapped__() == wanted


def test_only_what_asks_for_it_goes_by_onednn():
    ours, plain = pair()
    assert products_of(ours) is products.ONEDNN
    assert products_of(plain) is products.TORCH
