"""Modules are found by patterns of their names, and replaced wherever a layer refers to them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from raypar.actors.models.module_tree import modules_named, replace_modules


class Pair(NamedTuple):
    left: nn.Module
    right: nn.Module


class Layer(nn.Module):
    """Refers to one linear layer in every way that is followed."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, 3)
        self.down = nn.Linear(3, 2)
        self.same = self.up
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), self.up)])
        self.listed, self.by_name, self.both = [self.up], {"up": self.up, "width": 3}, (self.up, self.down)
        self.pair = Pair(self.up, self.down)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("l.up", ["up"]),
        ("l.same", ["up"]),
        ("l.blocks.*.0", ["blocks.0.0"]),
        ("l.[ud]*", ["up", "down"]),
        ("l.*.up", []),
        ("l", [""]),
        ("l.nothing", []),
    ],
)
def test_a_pattern_finds_each_module_once(pattern, found):
    assert [name for name, _ in modules_named(Layer(), "l", pattern)] == found


def test_every_reference_is_replaced():
    layer = Layer()
    old, down, listed = layer.up, layer.down, layer.listed
    new = nn.Linear(2, 1)
    replace_modules(layer, {old: new})
    assert layer.up is layer.same is layer.blocks[0][1] is layer.by_name["up"] is new
    assert layer.listed is listed and listed == [new]
    assert layer.both == (new, down)
    assert old not in set(layer.modules())
    assert layer.pair == (old, down), "a tuple of another type is left alone"


def test_hooks_buffers_children_and_attributes_go_over_but_parameters_do_not():
    layer, calls = Layer(), []
    old, new = layer.up, nn.Linear(2, 1)
    old.register_forward_hook(lambda *_: calls.append("old"))
    own = new.register_forward_hook(lambda *_: calls.append("new"))
    old.register_buffer("scale", torch.ones(1), persistent=False)
    old.child, old.note, old.in_features = nn.Tanh(), "mine", 7
    old.eval()
    replace_modules(layer, {old: new})
    new(torch.ones(1, 2))
    assert calls == ["old", "new"]
    own.remove()
    new(torch.ones(1, 2))
    assert calls == ["old", "new", "old"], "handles still work"
    assert new.scale is old.scale and "scale" not in new.state_dict()
    assert new.child is old.child and new.note == "mine" and not new.training
    assert new.in_features == 2 and new.weight.shape == (1, 2), "what the new one has is its own"
