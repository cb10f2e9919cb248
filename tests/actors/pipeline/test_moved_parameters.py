"""A frozen parameter that a forward moves, as the teacher of BYOL or MoCo, is state, and moves once a microbatch."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import raypar as rp
from raypar.actors.autograd.forward_state import FrozenWrites, submodules
from raypar.actors.autograd.torch_private import is_intercepted
from raypar.actors.errors import ActionError, NonFiniteError
from tests.support.snapshots import loaded, saved
from tests.support.team import Team, batch, mse

RATE = 0.1


def lerp(teacher, student):
    with torch.no_grad():
        teacher.lerp_(student, 0.5)


def through_data(teacher, student):
    teacher.data.mul_(0.5).add_(student.data * 0.5)


def other_data(teacher, student):
    teacher.data = teacher.data * 0.5 + student.data * 0.5


def together(teacher, student):
    torch._foreach_lerp_([teacher.detach()], [student.detach()], 0.5)


WAYS = {"lerp": lerp, "data": through_data, "other data": other_data, "foreach": together}


class Taught(nn.Module):
    """A layer, and what its teacher makes of the same input; the teacher follows the layer at every forward."""

    def __init__(self, way, since=0):
        super().__init__()
        self.student = nn.Linear(4, 4)
        self.teacher = deepcopy(self.student).requires_grad_(False)
        with torch.no_grad():
            self.teacher.weight.mul_(0.3)
        self.way, self.since, self.calls = way, since, 0

    def forward(self, x):
        if self.training:
            self.calls += 1
            if self.calls > self.since:
                for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    self.way(mine, other)
        return torch.tanh(self.student(x)) - 0.3 * self.teacher(x)


def layers(way):
    return lambda: [Taught(way), Taught(way)]


def team_of(way="lerp", **changes):
    settings = {"optim": rp.SGD(lr=RATE, momentum=0.0), "m": 2} | changes
    return Team(layers(WAYS[way]), **settings)


def state(team):
    """All weights of replica 0, frozen ones too."""
    frozen = {}
    for rank in team.world.replica(0):
        frozen |= {name: tensor.clone() for name, tensor in team.all[rank].member.state.part.fixed().items()}
    return {name: weight.clone() for name, weight in team.weights().items()} | frozen


def plainly(first, steps, microbatches=2, start=0):
    """By torch alone: the teacher moves once a microbatch, and the weights once a step."""
    weights = {name: value.clone() for name, value in first.items()}
    for step in range(start, start + steps):
        leaves = {name: w.requires_grad_() for name, w in weights.items() if "student" in name}
        total = 0.0
        for microbatch in range(microbatches):
            x, target = batch(step, microbatch, 0)
            for index in range(2):
                for part in ("weight", "bias"):
                    name = f"layers.{index}.teacher.{part}"
                    weights[name] = torch.lerp(weights[name], weights[f"layers.{index}.student.{part}"].detach(), 0.5)
                at = partial("layers.{}.{}.{}".format, index)
                made = [
                    nn.functional.linear(x, weights[at(who, "weight")], weights[at(who, "bias")])
                    for who in ("student", "teacher")
                ]
                x = torch.tanh(made[0]) - 0.3 * made[1]
            total = total + mse(x, target) / microbatches
        gradients = torch.autograd.grad(total, list(leaves.values()))
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            weights[name] = (leaf - RATE * gradient).detach()
    return weights


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.allclose(tensor, wanted[name].detach(), rtol=1e-5, atol=1e-6), name


RECOMPUTED = {"none": "none", "stages": "full", "layers": ["full", "none"]}


@pytest.mark.sampled
@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("way", WAYS)
def test_a_teacher_moves_once_a_microbatch_however_its_layer_is_computed(way, recompute):
    word = RECOMPUTED[recompute]
    team = team_of(way, recompute=word if isinstance(word, str) else tuple(word), pp=1 if recompute == "layers" else 2)
    first = state(team)
    for step in range(3):
        team.step(step)
    assert_close(state(team), plainly(first, 3))


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("there", [{"pp": 2}, {"pp": 1, "dp": 2, "zero": 0}])
def test_it_is_in_a_checkpoint_bit_for_bit(way, there, tmp_path):
    team = team_of(way)
    for step in range(2):
        team.step(step)
    kept = state(team)
    other = loaded(team_of(way, **there), tmp_path, saved(team, tmp_path))
    found = state(other)
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())
    (tmp_path / "again").mkdir()
    again = saved(other, tmp_path / "again")
    assert {name for name in again if "teacher" in name} >= {f"buffers.dp0.{n}" for n in kept if "teacher" in n}


def test_a_model_whose_frozen_parameters_stay_saves_none_of_them(tmp_path):
    team = Team(lambda: [nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)], pp=1, m=2)
    team.step(0)
    assert not [name for name in saved(team, tmp_path) if "layers.1" in name]


def poisoned(step, microbatch, dp):
    x, target = batch(step, microbatch, dp)
    return x, target * float("nan") if step == 0 and microbatch == 1 else target


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_is_not_taken_puts_it_back(way, recompute):
    team = team_of(way, data=poisoned, recompute=recompute)
    first = state(team)
    results = team.each(lambda actor: actor.train(0))
    assert all(isinstance(one, NonFiniteError) for one in results)
    assert all(torch.equal(tensor, first[name]) for name, tensor in state(team).items())
    team.step(1)
    assert_close(state(team), plainly(first, 1, start=1))


def test_one_that_moves_later_than_the_first_step_is_kept_from_then_on(tmp_path):
    def made():
        return [Taught(lerp, since=3), Taught(lerp, since=3)]

    settings = {"optim": rp.SGD(lr=RATE, momentum=0.0), "m": 2}
    team = Team(made, **settings)
    for step in range(3):
        team.step(step)
    kept = state(team)
    found = state(loaded(Team(made, **settings), tmp_path, saved(team, tmp_path)))
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_one_that_moves_later_is_not_computed_again_from_what_it_is_now(recompute):
    word = RECOMPUTED[recompute]
    word = word if isinstance(word, str) else ("none", *word)
    team = Team(lambda: [nn.Linear(4, 4), Taught(lerp, since=2), nn.Linear(4, 4)], pp=1, m=2, recompute=word)
    if recompute == "none":
        team.step(0), team.step(1)
        return
    with pytest.raises(
        ActionError, match=r"\(Linear.bias, Linear.weight\) were first written .* can't be run again.*0\.0"
    ):
        team.step(0), team.step(1)


def test_of_one_that_moves_first_in_a_step_that_is_not_taken_a_warning_says_so(caplog):
    def late(step, microbatch, dp):
        return poisoned(1 - step, microbatch, dp)

    team = Team(lambda: [Taught(lerp, since=2)], pp=1, m=2, data=late)
    team.step(0)
    assert not caplog.messages
    (result,) = team.each(lambda actor: actor.train(1))
    assert isinstance(result, NonFiniteError)
    assert "first written into by a later forward" in caplog.text


def test_with_flushes_an_update_that_is_made_again_leaves_it_as_the_forwards_made_it():
    """The update is clipped, which is known only when forwards of the next step have come."""
    rows = {}
    for flush in (None, 2):
        team = team_of(pp=1, clip=0.05, flush_every=flush)
        team.each(lambda actor, every=flush: [actor.train(at, None, 0, every or 0) for at in range(0, 4, every or 1)])
        rows[flush] = state(team)
    assert all(torch.equal(tensor, rows[None][name]) for name, tensor in rows[2].items())


def test_a_step_by_hand_that_is_rewound_puts_it_back():
    team = team_of()
    first = state(team)
    rows = team.programs["train"].rows

    def by_hand(actor, then):
        actor.open(0)
        for action in rows[team.all.index(actor)]:
            if str(action).endswith("STEP"):
                break
            actor.member.perform(action)
        then(actor)

    team.each(lambda actor: by_hand(actor, lambda one: one.member.rewind()))
    assert all(torch.equal(tensor, first[name]) for name, tensor in state(team).items())


def test_layers_compute_as_always_while_writes_are_noticed():
    """Else the first forward would take other kernels than all later ones."""
    with FrozenWrites([nn.Linear(2, 2).requires_grad_(False)]):
        assert not is_intercepted()
        with FlopCounterMode(display=False):
            assert is_intercepted()
    assert not is_intercepted()


def test_submodules_are_those_of_torch():
    shared = nn.Linear(2, 2)
    tree = nn.Sequential(nn.Sequential(shared, nn.Dropout(), shared), nn.ModuleDict({"a": shared, "b": nn.Tanh()}))
    tree.register_module("none", None)
    found = submodules([tree, shared])
    assert len(found) == 6 and {*found} == {*tree.modules()}
