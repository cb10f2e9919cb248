"""A backward that fails names the layer, and the line of the user's whose gradient it could not compute."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.errors import ActionError
from raypar.actors.pipeline import stage as backward_faults
from tests.support.team import Team


class InPlace(nn.Module):
    """Changes what the backward of exp needs."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        y = self.lin(x).exp()  # the line of InPlace
        z = y * 2
        y += 1
        return y + z


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient.nothing


class Own(nn.Module):
    """Calls a function whose backward fails."""

    def forward(self, x):
        return Doubled.apply(x)  # the line of Own


class Later(nn.Module):
    """Changes what the layer before it returned and needs."""

    def forward(self, x):
        return x.add_(1)


def failed(fn, loss=None, **changes):
    """The first failure of a step."""
    team = Team(fn, **changes) if loss is None else Team(fn, loss=loss, **changes)
    results = team.each(lambda actor: actor.train(0))
    errors = [result for result in results if isinstance(result, ActionError) and not result.secondary]
    assert len(errors) == 1, results
    return errors[0]


LAYOUTS = {
    "one stage": {"pp": 1},
    "pipeline": {"pp": 2},
    "recomputed": {"pp": 2, "recompute": "full"},
    "halves": {"pp": 2, "schedule": "zb-h1"},
    "replicas": {"pp": 1, "dp": 1, "m": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layer", [InPlace, Own])
def test_the_line_is_named(layer, layout):
    error = failed(lambda: [nn.Linear(4, 4), layer(), nn.Linear(4, 4)], **LAYOUTS[layout])
    assert re.search(r"B0|I0", error.action)
    lines = Path(__file__).read_text().splitlines()
    number = next(at for at, line in enumerate(lines, 1) if line.endswith(f"# the line of {layer.__name__}"))
    code = lines[number - 1].strip().split("  #")[0]
    assert f"(in layers.1, in the backward of test_backward_faults.py:{number}: {code}" in error.reason


def test_what_a_later_layer_changes_is_a_fault_of_the_line_that_needs_it():
    error = failed(lambda: [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), Later()], pp=1)
    assert "(in layers.1" in error.reason


def test_a_layer_of_torch_has_no_line_of_the_user_s():
    """What called the actor, as Ray or this test, is none."""
    error = failed(lambda: [nn.Linear(4, 4), nn.Sigmoid(), nn.ReLU(inplace=True)], pp=1)
    assert error.reason.endswith("(in layers.1)")

    def loss(output, target):
        return output.sigmoid_().mean()

    error = failed(lambda: [nn.Linear(4, 4), nn.Sigmoid()], loss, pp=1)
    assert error.reason.endswith("(in layers.1)")


def test_in_a_loss_there_is_no_layer():
    def loss(output, target):
        return Doubled.apply((output - target).pow(2).mean())

    error = failed(lambda: [nn.Linear(4, 4)], loss, pp=1)
    assert re.search(r"\(in the backward of test_backward_faults.py:\d+: return Doubled.apply", error.reason)


def test_layers_that_talk_to_other_actors_are_not_called_once_more(monkeypatch):
    def never(*_):
        raise AssertionError("a forward of its own would wait for the others")

    monkeypatch.setattr(backward_faults, "forward_of_fault", never)
    monkeypatch.setattr("raypar.actors.pipeline.stage.forward_of_fault", never)
    pair = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)
    plan = {"layers.0.0": "column", "layers.0.2": "row"}
    model = rp.Layers(lambda: [nn.Sequential(*pair), Own()], nn.functional.mse_loss, plan=plan)
    results = Team(None, 1, 1, tp=2, model=model).each(lambda actor: actor.train(0))
    assert all(isinstance(result, ActionError) and "nothing" in result.reason for result in results)


def test_what_can_not_be_found_is_left_out():
    assert backward_faults.forward_of_fault(lambda: None, ["layers.0"]) == ""
    assert backward_faults.forward_of_fault(lambda: 1 / 0, ["layers.0"]) == ""
