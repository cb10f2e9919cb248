"""A layer that uses another layer's weight without registering it: told before any actor starts, and never silent."""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from raypar.actors.errors import ActionError
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.init import unregistered
from raypar.actors.models.init.unregistered import Borrowed, borrowed
from raypar.actors.models.own.user_layers import LayersModel
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.config.run import check_run
from raypar.errors import ConfigError
from tests.support.team import Team, batch, mse


class Keeps:
    """An object that is no module."""

    def __init__(self, module):
        self.module = module


class Uses(nn.Module):
    """Multiplies by the weight of another layer, to which it refers in one way or another."""

    def __init__(self, enc, how):
        super().__init__()
        self.own = nn.Parameter(torch.zeros(4))
        if how == "a list":
            self.enc = [enc]
        elif how == "__dict__":
            self.__dict__["enc"] = enc
        elif how == "an object":
            self.enc = Keeps(enc)
        elif how == "a list of weights":
            self.enc = [enc.weight]
        elif how == "registered":
            self.enc = enc
        self.weight = (lambda: enc.weight) if how == "a closure" else lambda: self.enc_weight(how)

    def enc_weight(self, how):
        found = {"a list": lambda: self.enc[0].weight, "an object": lambda: self.enc.module.weight}
        found["a list of weights"] = lambda: self.enc[0]
        return found.get(how, lambda: self.enc.weight)()

    def forward(self, x):
        return x @ self.weight() + self.own


HIDDEN = ["a list", "__dict__", "an object", "a list of weights", "a closure"]
ENC = this_module = None  # what a layer may name as a global variable
KEPT = {}  # where a layer may find it


def kept():
    return KEPT["enc"].weight


class Registry:
    """Keeps a layer as an attribute of the class."""

    enc = None


def layers(how):
    def build():
        enc = nn.Linear(4, 4)
        return [enc, nn.Tanh(), Uses(enc, how), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]

    return build


def run_of(how, pp, **changes):
    run = Run(model=Layers(layers(how), mse, halves=True), data=Batches(batch, batch), mesh=Mesh(pp=pp))
    return replace(run, microbatches=4, **changes)


@pytest.mark.parametrize("how", HIDDEN)
def test_it_is_told_before_any_actor_starts(how):
    says = (
        r"model: layers\.2 uses layers\.0\.weight without registering it, and they are on different actors, pp=1 and "
        r"pp=0: make the module or the parameter an attribute of layers\.2"
    )
    with pytest.raises(ConfigError, match=says) as caught:
        check_run(run_of(how, 3))
    assert len(caught.value.faults) == 1
    check_run(run_of(how, 3, split=(3, 2, 1)))


@pytest.mark.parametrize("pp", [1, 3])
def test_a_registered_one_is_a_tied_weight(pp):
    assert borrowed(layers("registered")()) == []
    check_run(run_of("registered", pp))


@pytest.mark.sampled
@pytest.mark.parametrize("how", HIDDEN)
def test_on_one_actor_it_trains_as_one_process_does(how):
    teams = [Team.of(run_of(how, pp, split=split)) for pp, split in ((1, "even"), (2, (3, 3)))]
    for team in teams:
        for step in range(2):
            team.step(step)
    ones, others = (team.weights() for team in teams)
    assert ones.keys() == others.keys()
    assert all(torch.equal(weight, others[name]) for name, weight in ones.items())


@pytest.mark.parametrize("how", HIDDEN)
def test_an_actor_that_has_only_the_user_of_a_weight_refuses(how):
    """Whatever the driver has found."""
    model = LayersModel(Layers(layers(how), mse), 0)
    if model._recording is None:  # it was built whole: nothing is on the meta device
        assert all(not p.is_meta for module in model.materialize([2], 0) for p in module.parameters())
        return
    with pytest.raises(ValueError, match="a layer uses a weight of another actor's layer without registering it"):
        model.materialize([2, 3], 0)
    assert len(model.materialize([0, 1, 2], 0)) == 3


class Hides(nn.Module):
    """Keeps a module that nobody registers, as a frozen helper."""

    def __init__(self):
        super().__init__()
        self.own, self.helper = nn.Linear(4, 4), [nn.Linear(4, 4)]

    def forward(self, x):
        return self.own(x) + self.helper[0](x).detach()


def test_a_module_that_nobody_registers_is_built_with_the_others():
    teams = [Team(lambda: [Hides(), nn.Linear(4, 4)], pp) for pp in (1, 2)]
    losses = [[result.losses for result in team.step(0)][-1] for team in teams]
    assert losses[0] == losses[1]


def test_each_pair_of_layers_is_named_once():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    user = nn.Identity()
    user.refs = [one, one, other.bias]
    assert borrowed([one, other, user]) == [Borrowed(2, 1, "bias"), Borrowed(2, 0, "weight")]


class Named(nn.Module):
    """Uses another layer by a global variable."""

    def forward(self, x):
        return ENC(x)


class OfClass(nn.Module):
    """Uses another layer by an attribute of its class."""

    enc = ()

    def forward(self, x):
        return self.enc[0](x)


def test_globals_classes_and_weak_references_are_followed(monkeypatch):
    enc = nn.Linear(2, 2)
    monkeypatch.setitem(globals(), "ENC", enc)
    monkeypatch.setattr(OfClass, "enc", [enc])
    weak, of_set = nn.Identity(), nn.Identity()
    weak.ref, of_set.refs = weakref.ref(enc), weakref.WeakSet([enc])
    for user in (Named(), OfClass(), weak, of_set):
        assert borrowed([enc, user]) == [Borrowed(1, 0, "weight")], user


BY_NAME = {
    "a dict": lambda: KEPT["enc"].weight,
    "a function that is called": lambda: kept(),
    "a function in a function": lambda: (lambda: ENC.weight)(),
    "a class": lambda: Registry.enc.weight,
    "a class of a module": lambda: this_module.Registry.enc.weight,
}


@pytest.fixture
def named(monkeypatch):
    """Put a layer where all of BY_NAME find it, and return it."""

    def put(enc):
        monkeypatch.setitem(globals(), "this_module", sys.modules[__name__])
        monkeypatch.setitem(globals(), "ENC", enc)
        monkeypatch.setitem(KEPT, "enc", enc)
        monkeypatch.setattr(Registry, "enc", enc)
        return enc

    return put


@pytest.mark.parametrize("how", BY_NAME)
def test_what_functions_name_is_followed(named, how):
    enc, user = named(nn.Linear(2, 2)), nn.Identity()
    user.get = BY_NAME[how]
    assert borrowed([enc, user]) == [Borrowed(1, 0, "weight")]


class Looks(nn.Module):
    """Multiplies by a weight that it looks up, and that nothing trains."""

    def __init__(self, get):
        super().__init__()
        self.own, self.get = nn.Parameter(torch.ones(4)), get

    def forward(self, x):
        return x * self.own @ self.get()


class Owns(nn.Module):
    """Has a weight for others, and does not use it."""

    def __init__(self, keep):
        super().__init__()
        self.own, self.weight = nn.Parameter(torch.ones(4)), nn.Parameter(torch.eye(4), requires_grad=False)
        keep(self.weight)

    def forward(self, x):
        return x * self.own


def test_a_frozen_weight_in_a_global_has_its_values():
    """On meta memory, the matrix product gave what was in memory."""
    team = Team(lambda: [Owns(lambda weight: KEPT.update(weight=weight)), Looks(lambda: KEPT["weight"])], 1)
    expected = [mse(x, target).item() for x, target in (batch(0, microbatch, 0) for microbatch in range(4))]
    assert team.step(0)[-1].losses == pytest.approx(expected)


def test_no_layer_computes_with_a_weight_that_has_no_values():
    """Whatever a search has missed."""
    hidden = np.empty(1, dtype=object)  # numpy does not tell the garbage collector what it refers to
    team = Team(lambda: [Owns(lambda weight: hidden.__setitem__(0, weight)), nn.Tanh(), Looks(lambda: hidden[0])], 1)
    with pytest.raises(ActionError, match=r"a weight or buffer is used that has no values here.*\(in layers\.2\)"):
        team.step(0)


class Returns(Looks):
    def forward(self, x):
        return self.get() + 0.0  # no tensor with values takes part, so that the mode sees nothing amiss


def test_no_stage_returns_a_tensor_without_values():
    """Sent to the next stage it would be whatever was in memory."""
    hidden = np.empty(1, dtype=object)
    team = Team(lambda: [Owns(lambda weight: hidden.__setitem__(0, weight)), Returns(lambda: hidden[0])], 1)
    with pytest.raises(ActionError, match=r"a weight or buffer is used that has no values here.*\(in layers\.1\)"):
        team.step(0)


def test_a_reference_behind_many_tables_is_found():
    enc, user = nn.Linear(2, 2), nn.Identity()
    user.table, user.get = [[number] for number in range(2_000)], lambda: enc.weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unregistered, "_MOST", 500)
        assert borrowed([enc, user]) == [Borrowed(1, 0, "weight")]
        assert unregistered.unsearched([enc, user]) == [1]


def test_a_reference_behind_many_plain_values_is_found():
    enc, user = nn.Linear(2, 2), nn.Identity()
    user.table, user.enc = {str(number): number for number in range(300_000)}, [enc]
    assert borrowed([enc, user]) == [Borrowed(1, 0, "weight")]


@pytest.mark.parametrize("how", ["a buffer", "an attribute", "a parameter", "itself"])
def test_a_view_of_another_layers_weight_is_told(how):
    enc, user = nn.Linear(2, 2), nn.Identity()
    if how == "a buffer":
        user.register_buffer("w", enc.weight.detach())
    elif how == "itself":
        vars(user)["w"] = enc.weight
    else:
        user.w = enc.weight.data if how == "an attribute" else nn.Parameter(enc.weight.data)
    assert borrowed([enc, user]) == [Borrowed(1, 0, "weight")]


def test_layers_may_share_constants_and_tied_weights():
    mask = torch.ones(4, 4)
    one, other, tied = nn.Identity(), nn.Identity(), nn.Linear(4, 4)
    one.register_buffer("mask", mask)
    other.register_buffer("mask", mask[:2])
    tied.same = nn.Linear(4, 4)
    copy = nn.Linear(4, 4)
    copy.weight = tied.weight
    assert borrowed([one, other, tied, copy]) == []
