"""How much state every optimizer keeps on the actors, in multiples of the weights, after a step."""

from __future__ import annotations

import pytest

from raypar.actors.specs.model import GPT
from raypar.actors.specs.optim import SGD, AdamW, Muon
from tests.support.layouts import tokens
from tests.support.team import Team, linears

MODEL = GPT(layers=2, hidden=16, heads=2, seq=8, vocab=11)
TABLE = {
    "sgd": (SGD(momentum=0.0), 0),
    "momentum": (SGD(momentum=0.9), 1),
    "adam": (AdamW(weight_decay=0.0), 2),
    "adamw": (AdamW(), 2),
}


def counted(team):
    """Elements of the weights, of their states on all actors (steps left out), and of momentum buffers among these."""
    weights = {name: weight.numel() for name, weight in team.weights().items()}
    state, single = 0, 0
    for worker in team.workers:
        for name, key, tensor in worker.member.parts.update.state():
            if key and tensor.dim():
                assert tensor.numel() <= weights[name]
                state += tensor.numel()
                single += tensor.numel() * (key == "momentum_buffer")
    return sum(weights.values()), state, single


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"dp": 2, "zero": 1}])
@pytest.mark.parametrize(("optim", "times"), TABLE.values(), ids=TABLE)
def test_the_state_is_so_many_times_the_weights(optim, times, layout):
    team = Team(linears(4), **{"pp": 1, "m": 2} | layout, optim=optim)
    team.step(0)
    weights, state, _ = counted(team)
    assert state == times * weights


@pytest.mark.parametrize("dp", [1, 2])
def test_muon_keeps_once_its_matrices_and_twice_the_rest(dp):
    team = Team(None, 1, 2, dp=dp, model=MODEL, data=tokens, optim=Muon())
    team.step(0)
    weights, state, single = counted(team)
    matrices = sum(w.numel() for name, w in team.weights().items() if name.startswith("blocks.") and w.dim() == 2)
    assert single == matrices == 2 * 12 * 16**2
    assert state == 2 * weights - matrices


def test_replicas_without_zero_keep_it_once_more():
    team = Team(None, 1, 2, dp=2, zero=0, model=MODEL, data=tokens, optim=Muon())
    team.step(0)
    weights, state, single = counted(team)
    assert state == 2 * (2 * weights - single // 2)
