"""Replicas that divide the elements of every weight compute what replicas that divide the weights compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypar.actors.specs import worlds
from raypar.actors.specs.optim import SGD, AdamW
from tests.support.team import Team


def wide(count=2, width=40):
    """Weights of 26 blocks and biases of one, so that some replicas have no part of a bias."""
    return lambda: [nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)) for _ in range(count)]


@pytest.fixture
def cut(monkeypatch):
    def switch(*levels):
        monkeypatch.setattr(worlds, "CUT_LEVELS", frozenset(levels))

    return switch


def trained(steps=3, **fields):
    team = Team(wide(), **fields)
    norms = []
    for step in range(steps):
        norms += [{result.grad_norm for result in team.step(step)} - {None}]
    return team, norms, team.gradients(), team.weights()


def equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("optim", [AdamW(lr=0.01), SGD(lr=0.1, momentum=0.9)], ids=["adamw", "sgd"])
@pytest.mark.parametrize(("pp", "dp"), [(1, 2), (2, 2), (1, 3), (1, 4)])
def test_every_bit_is_that_of_weights_owned_whole(cut, zero, optim, pp, dp):
    fields = {"pp": pp, "dp": dp, "zero": zero, "optim": optim, "m": 4}
    _, norms, gradients, weights = trained(**fields)
    cut(1, 2)
    team, others, *found = trained(**fields)
    assert team.world.cuts
    equal(found[0], gradients)
    equal(found[1], weights)
    equal(team.masters(), weights)
    for ours, theirs in zip(others, norms, strict=True):
        assert list(ours) == pytest.approx(list(theirs), rel=1e-6)
    for replica in range(dp):
        equal(team.weights(replica), weights)
