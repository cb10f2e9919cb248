"""Linear layers that leave their weights for later, or make their gradients in a given place: the bits of nn.Linear."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from raypar.actors.pipeline.weight_grad import Linears


def backward(
    linears,
    out,
    gradient,
):
    """Goes back from ``out``; returns whose gradients were deferred in between."""
    with linears.postponed() as deferred:
        out.backward(gradient)
    left = deferred.parameters
    deferred.compute(linears.memory)
    return left


def taken_over(module, half=True):
    """Halved, or with places for its weights, whatever their size."""
    places = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
    linears = Linears([module], shared={p for p in places if places[p] > 1})
    linears.take_over()
    linears.halve(half)
    if not half:
        linears.make_in({p: partial(torch.full_like, p.detach(), 9.0) for p in module.parameters()}, least=0)
    linears.begin()
    return linears


def same(one, other):
    """Bits, and how they are laid out."""
    return torch.equal(one, other) and one.stride() == other.stride()


GRADIENTS = {
    "dense": torch.randn,
    "transposed": lambda shape, **kind: torch.randn(shape[::-1], **kind).permute(*reversed(range(len(shape)))),
    "expanded": lambda shape, **kind: torch.ones((), **kind).expand(shape),
}


@pytest.mark.each_pair
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("laid_out", GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(5,), (7, 33), (3, 7, 33), (2, 64, 128), (2, 3, 4, 64), (1, 1, 1), (0, 4)])
def test_gradients_have_the_bits_of_an_undivided_backward(shape, dtype, laid_out, half):
    for out, bias in ((1, True), (17, False), (257, True)):
        torch.manual_seed(out)
        plain = nn.Linear(shape[-1], out, bias=bias, dtype=dtype)
        ours = deepcopy(plain)
        linears = taken_over(ours, half)
        (ours,) = linears.modules
        for _ in range(2):  # the second one adds to the first
            x = torch.randn(shape, dtype=dtype).requires_grad_()
            y = x.detach().clone().requires_grad_()
            made, wanted = ours(y), plain(x)
            gradient = GRADIENTS[laid_out](wanted.shape, dtype=dtype)
            wanted.backward(gradient)
            left = backward(linears, made, gradient)
            assert bool(left) == (half and len(shape) in (2, 3) and x.numel() > 1)
            assert torch.equal(made, wanted)
            assert same(y.grad, x.grad)
            for parameter, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
                assert same(parameter.grad, theirs.grad)


class Thrice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x).tanh()
        return self.last(x)


@pytest.mark.parametrize("half", [False, True])
def test_a_layer_that_is_called_thrice_adds_up_in_the_same_order(half):
    plain = Thrice()
    ours = deepcopy(plain)
    linears = taken_over(ours, half)
    (ours,) = linears.modules
    x, gradient = torch.randn(5, 6), torch.randn(5, 6)
    calls = []
    for name, parameter in ours.named_parameters():
        parameter.register_hook(lambda gradient: gradient * 1)  # is never called with None
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    backward(linears, ours(x), gradient)
    plain(x).backward(gradient)
    assert sorted(calls) == ["last.bias", "last.weight", "layer.bias", "layer.weight"], "a hook is called once"
    for parameter, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, theirs.grad)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.one(x).tanh())


class Checkpointed(nn.Module):
    def __init__(self, reentrant=False):
        super().__init__()
        self.layer, self.reentrant = nn.Linear(6, 6), reentrant

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x).float()


class Again(torch.autograd.Function):
    """Runs a layer once more in the backward, and goes back through it by itself."""

    @staticmethod
    def forward(ctx, layer, x, *parameters):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            wanted = [x, *ctx.layer.parameters()]
            return None, *torch.autograd.grad(ctx.layer(x), wanted, gradient)


class RunAgain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return Again.apply(self.layer, x, *self.layer.parameters())


class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return torch.func.vmap(self.layer)(x)


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.compiled = torch.compile(self.layer, backend="eager")

    def forward(self, x):
        return self.compiled(x)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        return self.layer(x)


class Film(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(6, 6), nn.Bilinear(6, 6, 6)

    def forward(self, x):
        bias = self.other(x, x).mean(0)
        return torch.func.functional_call(self.layer, {"bias": bias}, (x,)) * bias


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=torch.complex64)

    def forward(self, x):
        return self.layer(torch.complex(x, x.flip(-1))).real


class Dual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        with forward_ad.dual_level():
            y, tangent = forward_ad.unpack_dual(self.layer(forward_ad.make_dual(x, torch.ones_like(x))))
        return y + tangent.detach()


UNTOUCHED = {
    "bias of the input": Film,
    "complex": Complex,
    "forward mode": Dual,
    "tied": Tied,
    "checkpointed": Checkpointed,
    "reentrant": lambda: Checkpointed(reentrant=True),
    "autocast": Cast,
    "run again": RunAgain,
    "vmap": Mapped,
    "compiled": Compiled,
    "frozen": Frozen,
    "made of others": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", UNTOUCHED)
def test_where_a_layer_can_leave_nothing_it_is_what_it_was(kind, half):
    plain = UNTOUCHED[kind]()
    ours = deepcopy(plain)
    linears = taken_over(ours, half)
    (ours,) = linears.modules
    gradient, x = torch.randn(5, 6), torch.randn(5, 6).requires_grad_()
    y = x.detach().clone().requires_grad_()
    assert not backward(linears, ours(y), gradient)
    plain(x).backward(gradient)
    assert torch.equal(y.grad, x.grad)
    for parameter, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is None if parameter.grad is None else torch.equal(parameter.grad, theirs.grad)


class Swapped(nn.Module):
    """Calls a layer with a weight of its own instead."""

    def __init__(self):
        super().__init__()
        self.layer, self.own = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return torch.func.functional_call(self.layer, {"weight": self.own}, (x,))


@pytest.mark.parametrize("half", [False, True])
def test_a_gradient_belongs_to_the_weight_that_was_there(half):
    ours = Swapped()
    x = torch.randn(5, 6)
    backward(taken_over(ours, half), ours(x), torch.ones(5, 6))
    assert ours.layer.weight.grad is None
    torch.testing.assert_close(ours.own.grad, torch.ones(6, 5) @ x)


def test_a_frozen_bias_gets_no_gradient():
    layer = nn.Linear(6, 6)
    layer.bias.requires_grad_(False)
    linears = taken_over(layer)
    backward(linears, linears.modules[0](torch.randn(5, 6)), torch.randn(5, 6))
    assert (layer.weight.grad is not None, layer.bias.grad) == (True, None)


@pytest.mark.parametrize("half", [False, True])
def test_a_loss_may_have_a_gradient_in_it(half):
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    ours, x = deepcopy(plain), torch.randn(5, 6)
    linears = taken_over(ours, half)
    (ours,) = linears.modules

    def penalty(model):
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    penalty(plain).backward()
    backward(linears, penalty(ours), None)
    for parameter, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs.grad)


@pytest.mark.parametrize("half", [False, True])
def test_the_first_gradient_of_a_step_is_made_in_its_place(half):
    layer = nn.Linear(1024, 1024)
    place, small = torch.full((1024, 1024), 7.0), torch.full((1024,), 7.0)
    linears = Linears([layer])
    linears.halve(half)
    linears.make_in({layer.weight: lambda: place, layer.bias: lambda: small})
    linears.begin()
    (layer,) = linears.modules
    x = torch.randn(5, 1024)
    for count in (1.0, 2.0):
        backward(linears, layer(x), torch.ones(5, 1024))
        assert layer.weight.grad.data_ptr() == place.data_ptr()
        torch.testing.assert_close(place, count * torch.ones(5, 1024).t() @ x)
    layer.weight.grad = None  # not the first one of the step any more
    backward(linears, layer(x), torch.ones(5, 1024))
    assert layer.weight.grad.data_ptr() != place.data_ptr()
    layer.weight.grad = None
    linears.begin()
    backward(linears, layer(x), torch.ones(5, 1024))
    assert layer.weight.grad.data_ptr() == place.data_ptr()
    assert torch.equal(small, torch.full((1024,), 7.0)), "what is small is copied by others"


WRITERS = {"all": lambda y: nn.functional.relu_(y), "a part": lambda y: y[..., :2].mul_(2.0)}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 6), (2, 7, 6)])
def test_outputs_may_be_written_into(shape, bias, write, half):
    plain = nn.Linear(6, 6, bias=bias)
    ours = deepcopy(plain)
    linears, x = taken_over(ours, half), torch.randn(shape)
    (ours,) = linears.modules
    one, other = ours(x), plain(x)
    WRITERS[write](one)
    WRITERS[write](other)
    gradient = torch.randn(shape)
    assert backward(linears, one, gradient) == (frozenset(ours.parameters()) if half else frozenset())
    other.backward(gradient)
    assert torch.equal(one, other)
    for parameter, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, theirs.grad)


@pytest.mark.parametrize("which", ["input", "gradient"])
def test_what_is_deferred_must_not_be_written_meanwhile(which):
    layer = nn.Linear(6, 6)
    linears, x, gradient = taken_over(layer), torch.randn(5, 6), torch.randn(5, 6)
    out = linears.modules[0](x)
    with linears.postponed() as deferred:
        out.backward(gradient)
    (x if which == "input" else gradient).mul_(0.5)
    with pytest.raises(RuntimeError, match="was changed in place before the gradient of its weights was made"):
        deferred.compute({})


def test_small_layers_are_not_taken_over_for_the_sake_of_a_place():
    layer = nn.Linear(8, 8)
    linears = Linears([layer])
    linears.make_in({layer.weight: lambda: torch.empty(8, 8)})
    assert linears.modules == (layer,)


def test_what_is_to_stay_whole_does():
    layers = [nn.Linear(6, 6), nn.Linear(6, 6)]
    linears = Linears(layers, whole=layers[1:])
    linears.take_over()
    linears.halve(True)
    first, second = linears.modules
    assert second is layers[1]
    left = backward(linears, second(first(torch.randn(5, 6))), torch.randn(5, 6))
    assert left == {*layers[0].parameters()}
