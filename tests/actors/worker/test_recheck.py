"""A microbatch that other replicas compute again: it changes no bit, and finds and names one that flips."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.errors import ActionError
from raypar.actors.worker.fault_injection import FaultInjector, flip_bit
from tests.support.team import Team, linears


class Normed(nn.Module):
    """A layer with buffers, which a forward changes."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x)).tanh()


LAYOUTS = {
    "dp2": {"pp": 1, "dp": 2},
    "1f1b": {"pp": 2, "dp": 2},
    "one microbatch": {"pp": 2, "dp": 3, "m": 1},
    "interleaved": {"pp": 2, "dp": 2, "schedule": "interleaved", "chunks": 2},
    "split": {"pp": 2, "dp": 2, "backward": "split"},
    "zero 1": {"pp": 1, "dp": 2, "zero": 1},
    "zero 2": {"pp": 2, "dp": 2, "zero": 2},
    "recompute": {"pp": 1, "dp": 2, "recompute": "full"},
}


def trained(fn, layout, **changes):
    team = Team(fn, **layout, **changes)
    losses = [[result.losses for result in team.step(step)] for step in range(3)]
    buffers = [one[-1].clone() for worker in team.workers for one in worker.member.state.buffers()]
    return losses, team.weights(), buffers


@pytest.mark.sampled
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_changes_no_bit(name):
    layers = lambda: [Normed() for _ in range(4)]  # noqa: E731
    losses, weights, buffers = trained(layers, LAYOUTS[name])
    again = trained(layers, LAYOUTS[name], recheck_every=2)
    assert again[0] == losses
    assert all(torch.equal(again[1][key], weight) for key, weight in weights.items())
    assert all(torch.equal(one, other) for one, other in zip(again[2], buffers, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("mesh", [rp.Mesh(dp=2, cp=2), rp.Mesh(dp=2, tp=2)])
def test_it_changes_no_bit_where_several_actors_compute_a_microbatch(mesh):
    model = rp.GPT(layers=2, hidden=32, heads=2, seq=16)
    run = rp.Run(model=model, mesh=mesh, microbatches=2, steps=3, timeout=10.0)

    def losses(run):
        team = Team.of(run)
        return [[result.losses for result in team.step(step)] for step in range(2)], team.weights()

    once, twice = losses(run), losses(replace(run, recheck_every=1))
    assert once[0] == twice[0] and all(torch.equal(twice[1][key], weight) for key, weight in once[1].items())


def test_a_first_forward_beside_frozen_weights_is_no_difference():
    """It is watched for writes into them, so that its linear layers leave nothing to the W."""
    model = rp.GPT(layers=2, hidden=16, heads=2, seq=8, lora=rp.Lora(rank=1))
    team = Team.of(rp.Run(model=model, mesh=rp.Mesh(dp=2), schedule="zb-h1", microbatches=2, recheck_every=1))
    assert found(team, step=0) == ([], [])


def found(team, culprit=None, fault=None, step=1):
    """What the actors raise in the second step, by label, as those at fault and those that others have misled."""
    if fault is not None:
        injector = team.all[culprit].member.faults = FaultInjector([fault])
        injector.weights = team.all[culprit].member.state.parameters
        injector.layers = {number: stage.modules[0] for number, stage in team.all[culprit].stages.items()}
    errors = [one for one in team.each(lambda actor: actor.train(step)) if isinstance(one, Exception)]
    assert all(isinstance(one, ActionError) for one in errors)
    return [one for one in errors if not one.secondary], [one for one in errors if one.secondary]


@pytest.mark.parametrize("pp", [0, 1])
def test_a_flipped_bit_in_an_activation_is_found_and_its_actor_named(pp):
    team = Team(linears(), pp=2, dp=3, recheck_every=2)
    team.step(0)
    before = team.weights()
    fault = rp.chaos.corrupt(f"pp={pp} dp=1", at=f"{pp}F0", step=2, of="activation")
    culprits, misled = found(team, 3 * pp + 1, fault)
    assert culprits
    for error in culprits:
        found_at = "outputs of 0F0" if pp == 0 else "outputs of 1I0"  # the loss is one number, and rounds it away
        assert f"in step 2 the {found_at} on pp={pp} dp=1 are not those of all others that" in error.reason
        assert error.actor.startswith(f"pp={pp} ") and error.action == "STEP"
    assert not any("outputs" in error.reason for error in misled)
    assert all(torch.equal(before[name], weight) for name, weight in team.weights().items()), "no weight was changed"


def test_of_two_both_are_named():
    team = Team(linears(), pp=1, dp=2, recheck_every=2)
    team.step(0)
    fault = rp.chaos.corrupt("pp=0 dp=1", at="0F0", step=2, of="activation")
    culprits, _ = found(team, 1, fault)
    assert " of 0B0 on pp=0 dp=0, pp=0 dp=1 are not alike, and nobody knows which are right" in culprits[0].reason


def test_a_flipped_bit_in_a_backward_is_found_where_nothing_else_tells_of_it():
    """The first stage passes on nothing but the gradients of its weights."""
    team = Team(linears(), pp=2, dp=3, recheck_every=2)
    stage = team.workers[2].stages[0]
    backward = stage.backward

    def flipping(step, microbatch, gradients):
        found = backward(step, microbatch, gradients)
        if microbatch == 2:  # the first one of replica 2, in the step itself or for another replica
            flip_bit([next(iter(stage.parameters().values())).grad])
        return found

    stage.backward = flipping
    team.step(0)
    culprits, _ = found(team)
    assert "the gradients of weights of 0B0 on pp=0 dp=2 are not those of all others" in culprits[0].reason


def test_a_batch_that_differs_between_processes_is_told_as_that():
    calls = []

    def data(step, microbatch, dp):
        calls.append(dp)
        x = torch.full((3, 4), float(dp + 1))
        return x * (1.0 + (step == 1) * len(calls)), x

    team = Team(linears(), pp=1, dp=2, data=data, recheck_every=2)
    team.step(0)
    culprits, _ = found(team)
    assert "a batch must depend on nothing but step, microbatch and dp" in culprits[0].reason


def test_runs_in_which_nobody_can_compute_it_again_are_refused():
    run = rp.Run(mesh=rp.Mesh(dp=2), microbatches=2, recheck_every=3)
    assert not rp.faults(run)
    experts = rp.GPT(layers=2, hidden=32, heads=2, seq=16, moe=rp.MoE(experts=4, top_k=2))
    for changes, why in (
        (
            {"mesh": rp.Mesh(pp=2)},
            "recheck_every is 3, but mesh.dp is 1, so no other actor has the same weights",
        ),
        ({"data_parallel": "parameter_server"}, "replicas of servers do not talk to each other"),
        ({"zero": 3}, "but zero is 3, so weights are on an actor only for a while"),
        ({"offload": "parameters"}, "but offload is 'parameters', so weights are"),
        ({"mesh": rp.Mesh(dp=2, ep=2), "model": experts}, "experts are divided over actors"),
    ):
        assert why in "\n".join(rp.faults(rp.Run(**{**vars(run), **changes})))
