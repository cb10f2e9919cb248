"""Before a launch: a warning of attributes that forwards change, which no checkpoint has."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.models.skeleton import Skeleton
from raypar.config.trial.silent_faults import warn_of_attributes


class Counts(nn.Module):
    """Keeps something of its forwards."""

    def __init__(self, change):
        super().__init__()
        self.inner, self.change = nn.Linear(4, 4), change
        self.calls, self.mode, self.queue = 0, "first", torch.zeros(4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.change(self, x)
        return self.inner(x)


def count(layer, x):
    layer.calls += 1


def name(layer, x):
    layer.mode = "later"


def queue(layer, x):
    layer.queue = x.mean(0)


def write(layer, x):
    layer.queue.zero_()


def buffer(layer, x):
    layer.seen += x.mean(0)


def nothing(layer, x):
    pass


def told(caplog, *changes):
    model = rp.Layers(lambda: [Counts(change) for change in changes], loss=nn.functional.mse_loss)
    run = rp.Run(model=model, data=rp.Batches(lambda *_: (torch.zeros(2, 4), torch.zeros(2, 4))), device="cpu")
    with caplog.at_level(logging.INFO, "raypar"):
        warn_of_attributes(run, Skeleton(model, 0))
    return caplog.messages


@pytest.mark.parametrize(
    ("change", "attribute"), [(count, "calls"), (name, "mode"), (queue, "queue"), (write, "queue")]
)
def test_an_attribute_that_changes_is_warned_of(caplog, change, attribute):
    (message,) = told(caplog, nothing, change)
    assert message.startswith(f"layers.1.{attribute} changes in a forward")
    assert "register_buffer" in message


def test_several_are_one_warning(caplog):
    (message,) = told(caplog, count, name)
    assert message.startswith("layers.0.calls and 1 more change")


@pytest.mark.parametrize("change", [buffer, nothing])
def test_buffers_and_what_stays_are_not(caplog, change):
    assert not told(caplog, change)
