"""Linear layers of one input as one product: what each makes by itself, and by itself where that does not pay."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raypar.actors.layers.attention import attention_blocks as causal
from raypar.actors.layers.attention.attention import Attention
from raypar.actors.layers.attention.attention_scratch import ScratchAllocator
from raypar.actors.layers.linear import Linear, SharedInputLinears, contiguous_columns
from raypar.actors.pipeline.weight_grad import Linears
from raypar.actors.specs.model import GPT
from tests.support.counted import threads

B, S, IN = 2, 256, 256
OUTS = (256, 128, 128)  # queries, and fewer keys and values: 2 ** 26 multiplications


class Projections(nn.Module):
    """A fan of three layers, and the same ones called one by one."""

    def __init__(self, outs=OUTS, kind=Linear, bias=False, together=True):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind(IN, out, bias=bias) for out in outs)
        self.fan = SharedInputLinears(together=together)

    def forward(self, x):
        return self.fan(x, *self.layers)

    def apart(self, x):
        return tuple(layer(x) for layer in self.layers)


def trained(call, parameters, gradients, linears=None):
    """Outputs, and gradients of the input and the parameters; through halves, if they are taken over."""
    torch.manual_seed(1)
    x = torch.randn(B, S, IN).requires_grad_()
    outs = call(x)
    if linears is None:
        torch.autograd.backward(outs, gradients)
    else:
        linears.begin()
        with linears.postponed() as deferred:
            torch.autograd.backward(outs, gradients)
        deferred.compute(linears.memory)
    return [*(out.detach() for out in outs), x.grad, *(parameter.grad for parameter in parameters)]


def gradients(outs=OUTS, side_by_side=True):
    made = torch.randn(B, S, sum(outs), generator=torch.Generator().manual_seed(2)).split(outs, -1)
    return made if side_by_side else [one.contiguous() for one in made]


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("side_by_side", [True, False], ids=["columns", "apart"])
def test_they_are_one_product_that_makes_what_each_layer_does(counted, side_by_side):
    ours = Projections()
    plain = Projections(kind=nn.Linear)
    given = gradients(side_by_side=side_by_side)
    made = trained(ours, ours.parameters(), given)
    backwards = [(IN, sum(OUTS))] if side_by_side else []  # one by one they are too small for oneDNN
    assert counted.weights == [(sum(OUTS), IN), *backwards]
    close(made, trained(plain.apart, plain.parameters(), given))


@pytest.mark.sampled
@pytest.mark.parametrize("side_by_side", [True, False], ids=["columns", "apart"])
@pytest.mark.parametrize("half", [True, False], ids=["halved", "placed"])
def test_taken_over_they_have_the_same_bits(counted, half, side_by_side):
    whole = Projections()
    ours = deepcopy(whole)
    linears = Linears([ours])
    linears.take_over()
    linears.halve(half)
    if not half:
        linears.make_in({p: partial(torch.full_like, p.detach(), 9.0) for p in ours.parameters()}, least=0)
    given = gradients(side_by_side=side_by_side)
    seen = []
    for number, parameter in enumerate(ours.parameters()):
        parameter.register_hook(lambda _, number=number: seen.append(number))
    for _ in range(2):  # the second gradient adds to the first
        made, wanted = trained(ours, ours.parameters(), given, linears), trained(whole, whole.parameters(), given)
        assert all(map(torch.equal, made, wanted))
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]
    with torch.no_grad():
        assert all(map(torch.equal, ours(torch.ones(B, S, IN)), whole(torch.ones(B, S, IN))))
    assert (sum(OUTS), IN) in counted.weights


def test_halved_they_leave_all_their_weights():
    ours = Projections()
    linears = Linears([ours])
    linears.take_over()
    linears.halve(True)
    linears.begin()
    outs = ours(torch.randn(B, S, IN))
    with linears.postponed() as deferred:
        torch.autograd.backward(outs, gradients())
    assert deferred.parameters == {*ours.parameters()}


def heard(projections):
    projections.layers[1].register_forward_hook(lambda *_: None)


def replaced(projections):
    layer = projections.layers[1]
    layer.forward = lambda x: nn.Linear.forward(layer, x)


def nothing(projections):
    """Nothing is changed."""


APART = {
    "not asked for": ({"together": False}, nothing),
    "with biases": ({"bias": True}, nothing),
    "torch's": ({"kind": nn.Linear}, nothing),
    "large": ({"outs": (2048, 1024, 1032)}, nothing),
    "small": ({"outs": (8, 8, 8)}, nothing),
    "somebody listens": ({}, heard),
    "one is replaced": ({}, replaced),
}


@pytest.mark.parametrize("case", APART)
def test_elsewhere_each_is_called(counted, case):
    settings, change = APART[case]
    ours = Projections(**settings)
    change(ours)
    x = torch.randn(B, S, IN)
    assert all(map(torch.equal, ours(x), ours.apart(x)))
    assert (sum(layer.out_features for layer in ours.layers), IN) not in counted.weights


def test_whose_layer_is_replaced_it_is_called_by_halves_too(counted):
    ours = Projections()
    replaced(ours)
    linears = Linears([ours])
    linears.take_over()
    linears.halve(True)
    ours(torch.randn(B, S, IN))
    assert (sum(OUTS), IN) not in counted.weights


def test_gradients_of_gradients_are_those_of_the_layers():
    found = []
    for call in (Projections(), Projections().apart):
        torch.manual_seed(1)
        x = torch.randn(B, S, IN).requires_grad_()
        (first,) = torch.autograd.grad(sum(out.square().sum() for out in call(x)), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    close(found[:1], found[1:])


def test_attention_in_blocks_makes_its_gradients_side_by_side(counted, monkeypatch):
    monkeypatch.setattr(causal, "of_intel", lambda: False)
    attention = Attention(GPT(layers=1, hidden=IN, heads=8, seq=S, linear="onednn"), None, ScratchAllocator(), Linear)
    with threads(1):
        attention(torch.randn(B, S, IN).requires_grad_()).sum().backward()
    assert counted.weights == [(3 * IN, IN), (IN, 3 * IN)]


@given(
    widths=st.lists(st.integers(1, 4), min_size=2, max_size=4, unique=True),
    lead=st.lists(st.integers(2, 3), min_size=1, max_size=2),
    spare=st.integers(0, 1),
    start=st.integers(0, 3),
)
def test_columns_are_known_for_what_they_are(widths, lead, spare, start):
    rows = torch.Size(lead).numel()
    room = torch.arange(start + rows * (sum(widths) + spare))[start:].view(*lead, -1)
    whole = room[..., : sum(widths)]
    parts = whole.split(widths, -1)
    found = contiguous_columns(parts)
    if spare:
        assert found is None, "what is more between them makes them no contiguous tensor"
    else:
        assert torch.equal(found, whole)
        assert found.data_ptr() == whole.data_ptr()
    assert contiguous_columns(parts[::-1]) is None
    assert contiguous_columns([*parts[:-1], parts[-1].clone()]) is None
    assert contiguous_columns([part.clone() for part in parts]) is None
