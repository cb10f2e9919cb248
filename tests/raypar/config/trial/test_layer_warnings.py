"""What layers on different actors share or may share unnoticed: told at the launch, with the layers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.init import unregistered
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.config.run import check_run
from raypar.config.trial.silent_faults import warn_of_layers


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), norm

    def forward(self, x):
        return self.norm(self.lin(x))


class Masked(nn.Module):
    def __init__(self, mask, persistent):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("mask", mask, persistent=persistent)

    def forward(self, x):
        return self.lin(x) * self.mask


def normed():
    norm = nn.BatchNorm1d(4, affine=False)
    return [Normed(norm), nn.Linear(4, 4), Normed(norm)]


def masked(persistent):
    mask = torch.ones(4)
    return [Masked(mask, persistent), nn.Linear(4, 4), Masked(mask, persistent)]


@pytest.fixture
def warned(caplog):
    def warn(layers, **changes):
        caplog.clear()
        data = Batches(lambda *_: (torch.ones(2, 4), torch.ones(2, 4)))
        run = Run(model=Layers(layers, loss=nn.functional.mse_loss), mesh=Mesh(pp=2), data=data)
        run = replace(run, **changes)
        skeleton = Skeleton(run.model, run.seed)
        warn_of_layers(run, skeleton, check_run(run, skeleton=skeleton)["train"])
        return caplog.text

    return warn


def test_a_norm_of_two_actors_is_told_with_both_layers(warned):
    told = warned(normed)
    assert "layers.0.norm.running_mean and layers.2.norm.running_mean are one buffer" in told
    assert "pp=0 and pp=1" in told
    assert told.count("WARNING") == 1
    assert "layers.0.mask and layers.2.mask" in warned(lambda: masked(True))


def test_what_is_on_one_actor_or_constant_is_no_fault(warned):
    assert not warned(normed, mesh=Mesh())
    assert not warned(lambda: masked(False))
    assert not warned(lambda: [Normed(nn.BatchNorm1d(4)), Normed(nn.BatchNorm1d(4))])


def test_a_layer_that_refers_to_too_much_is_named(warned, monkeypatch):
    monkeypatch.setattr(unregistered, "_MOST", 2_000)

    def layers():
        large = nn.Linear(4, 4)
        large.table = [[str(number)] for number in range(3_000)]
        return [nn.Linear(4, 4), large, nn.Linear(4, 4)]

    for pp, expected in ((1, []), (2, ["layers.1"])):
        text = warned(layers, mesh=Mesh(pp=pp))
        assert re.findall(r"(\S+) refers to more objects", text) == expected
