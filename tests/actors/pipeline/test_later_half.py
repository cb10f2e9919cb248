"""Modules of any kind in halves: autograd's own graph gives the gradients of inputs first, and the others in W."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypar.actors.autograd.later_half import LaterHalf
from raypar.actors.pipeline.weight_grad import DeferredGradients
from raypar.actors.specs.model import Layers
from tests.support.schedules import halved
from tests.support.team import Team, mse


class Scaled(nn.Module):
    """Its matrix is made of its parameters."""

    def __init__(self):
        super().__init__()
        self.scale, self.matrix = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6, 6))

    def forward(self, x):
        return (x * self.scale).tanh() @ (self.matrix / self.matrix.norm())


class Twice(nn.Module):
    """Calls one layer twice, whose gradients are one sum."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(self.conv(x).relu())


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum((0, 1))


class Written(nn.Module):
    """Multiplies in a function of its own, which computes all gradients at once."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))

    def forward(self, x):
        return Own.apply(x, self.weight)


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


KINDS = {
    "conv": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 1)), 4),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.PReLU()), 2),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 1)), 3),
    "parametrized": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)), 2),
    "own": (lambda: nn.Sequential(nn.LayerNorm(6), Scaled()), 1),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True), 7),
    "lstm": (Last, 4),
    "twice": (Twice, 0),
    "a function": (lambda: nn.Sequential(Written(), nn.Conv1d(4, 4, 1)), 2),
}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [False, True], ids=["", "first"])
def test_halves_have_the_bits_of_a_whole_backward(kind, first):
    """The first half makes the gradient of the input; nobody waits for that of a first stage."""
    make, most = KINDS[kind]
    torch.manual_seed(3)
    module, found = make(), []
    for halves in (False, True):
        module.zero_grad()
        for microbatch in range(2):
            torch.manual_seed(microbatch)
            x = torch.randn(3, 4, 6, requires_grad=not first)
            loss = module(x).square().mean()
            if not halves:
                loss.backward()
                continue
            before = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
            half = LaterHalf(loss, [*module.parameters()])
            assert len(half.parameters) == (len(before) if first else most)
            assert first or x.grad is not None
            for name, parameter in module.named_parameters():
                if parameter in half.parameters:
                    assert parameter.grad is None or torch.equal(parameter.grad, before[name]), "it is left"
            half.compute()
            assert not half.parameters
        found.append([x.grad, *(parameter.grad for parameter in module.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_what_is_kept_must_not_be_written_meanwhile():
    conv = nn.Conv1d(4, 4, 1)
    x = torch.randn(2, 4, 3, requires_grad=True)
    gradient = torch.ones(2, 4, 3)
    out = conv(x)
    out.register_hook(lambda _: gradient)
    half = LaterHalf(out.sum(), [*conv.parameters()])
    gradient.mul_(2.0)
    with pytest.raises(RuntimeError, match="was changed in place before"):
        half.compute()


def images(step, microbatch, dp):
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * microbatch + dp))
    return x, x.sin()


def layers():
    sequential, conv, linear, norm = nn.Sequential, nn.Conv1d, nn.Linear, nn.BatchNorm1d
    blocks = [
        lambda: sequential(conv(4, 4, 3, padding=1, bias=False), norm(4)),
        lambda: sequential(linear(6, 6), conv(4, 4, 1), nn.Tanh()),
        Twice,
        lambda: sequential(norm(4), conv(4, 4, 1), linear(6, 6)),
    ]
    return Layers(lambda: [block() for block in blocks], mse, halves=True)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "dp", "zero"), [("1f1b", 1, 0), ("interleaved", 2, 1), ("zb-h1", 1, 0)])
def test_modules_of_any_kind_in_a_pipeline(name, dp, zero, monkeypatch):
    """On replicas too, which reduce gradients as they come; W has something to do wherever a matrix is left."""
    paid, real = [], DeferredGradients.compute
    monkeypatch.setattr(
        DeferredGradients, "compute", lambda self, places: paid.append(self.others is not None) or real(self, places)
    )
    weights = []
    for schedule, backward in ((name.replace("zb-h1", "1f1b"), "whole"), (name, "split")):
        settings = {"dp": dp, "zero": zero, "data": images, "bucket_mb": 1e-4}
        team = Team(None, 2, 4, schedule, model=layers(), backward=backward, **settings)
        assert not any(paid)
        for step in range(2):
            team.step(step)
        weights.append(team.weights())
    assert any(paid)
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


@pytest.mark.parametrize("changes", [{"recompute": "full"}, {"dp": 2, "zero": 3}], ids=["recompute", "zero 3"])
def test_where_hooks_are_called_once_a_backward_it_has_no_halves(changes, monkeypatch):
    paid, real = [], DeferredGradients.compute
    monkeypatch.setattr(
        DeferredGradients, "compute", lambda self, places: paid.append(self.others) or real(self, places)
    )
    team = Team(None, 2, 4, halved("1f1b", 2, 4), model=layers(), data=images, **changes)
    team.step()
    assert paid.count(None) == len(paid) > 0
