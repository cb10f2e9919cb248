"""An error inside a module of torch's names the line of the user's that made the module."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from raypar.actors.errors import user_traceback
from raypar.actors.models.build import build_model
from raypar.actors.specs.model import Layers


def stock():
    return [
        nn.Linear(4, 8),
        nn.Sequential(
            nn.ReLU(),
            nn.Linear(9, 2),  # 9 is wrong
        ),
    ]


def drawing():
    """Layers whose build reads a value, so that it can't be recorded."""
    assert torch.rand(1).item() < 1
    return stock()


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return next(first + number for number, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("build", [stock, drawing])
def test_the_trace_begins_where_the_module_was_made(build, monkeypatch):
    model = build_model(Layers(build, loss=nn.functional.mse_loss), 0)
    first, second = model.materialize([0, 1], 0)
    value = first(torch.zeros(2, 4))
    ours = (inspect.getfile(model.note).rpartition("/actors/")[0], torch.__path__[0])
    monkeypatch.setattr("raypar.actors.errors._ours", lambda: (__file__, *ours))
    try:
        second(value)
    except RuntimeError as error:
        error.add_note(model.note(1, error))
        told = user_traceback().splitlines()
    assert told[0] == "Traceback (most recent call last):"
    assert told[1] == f'  File "{__file__}", line {line_of(stock, "9 is wrong")}, in stock'
    assert told[2].strip() == "nn.Linear(9, 2),  # 9 is wrong"
    assert "site-packages/torch" in told[3]
    assert told[-1].strip().startswith("^")  # the message has the rest, with "(in layers.1)"
