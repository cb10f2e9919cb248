"""Schedules whose backwards are in halves, I and W, on workers: the bits of whole backwards."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from raypar.actors.specs.model import Layers
from raypar.actors.specs.optim import SGD, AdamW
from raypar.schedules.action import Op
from raypar.schedules.schedule import Schedule
from tests.support.replicas import LAYOUTS, MODES, SHARED, UNEQUAL, agrees, shared
from tests.support.schedules import halved
from tests.support.team import Team, linears, mse


@pytest.mark.each_value
@pytest.mark.parametrize("recompute", ["none", "full", ("full", "none", "none", "full")])
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved"])
def test_halves_have_the_bits_of_one_process(name, recompute):
    team = Team(linears(4), 2, 4, halved(name, 2, 4), recompute=recompute, optim=AdamW(lr=0.01), clip=0.5)
    agrees(team, bound=0.0)


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    ranks=st.integers(1, 3),
    rounds=st.integers(1, 3),
)
def test_weights_may_come_any_time_later(seed, name, ranks, rounds):
    m = ranks * rounds
    team = Team(linears(6), ranks, m, halved(name, ranks, m, random.Random(seed)), steps=2)
    agrees(team, bound=0.0)


@pytest.mark.sampled
@pytest.mark.each_pair
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("equal", [True, False], ids=["equal counts", "unequal counts"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("dp", "pp"), LAYOUTS)
def test_halves_on_replicas(dp, pp, late, equal, mode):
    schedule = halved("1f1b", pp, 4, random.Random(7) if late else None)
    changes = {} if equal else UNEQUAL
    agrees(Team(linears(6), pp, 4, schedule, dp=dp, **MODES[mode], bucket_mb=1e-4, clip=0.5, steps=2, **changes))


class Asks(nn.Linear):
    """Asks for the gradient of a weight in its forward, of an input in its backward, and writes into one."""

    def __init__(self):
        super().__init__(4, 4)
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        y = nn.functional.relu_(self.inner(super().forward(x)))
        if not torch.is_grad_enabled():
            return y
        (asked,) = torch.autograd.grad(y.sum(), self.inner.weight, create_graph=True)
        z = x.detach().requires_grad_()
        inner = self.inner(z).tanh()
        y.register_hook(lambda gradient: gradient + torch.autograd.grad(inner, z, gradient, retain_graph=True)[0])
        return y + 0.01 * asked.norm()


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_modules_that_did_not_say_so_are_never_halved(name):
    """What they do in a forward or in hooks is theirs; their W has nothing left to do."""
    layers = Layers(lambda: [nn.Sequential(nn.Linear(4, 4), Asks()) for _ in range(2)], mse)
    agrees(Team(None, 2, 4, halved(name, 2, 4), model=layers), bound=0.0)
    agrees(Team(None, 2, 4, name, model=layers), bound=0.0)
    team = Team(None, 2, 4, name, model=layers)
    team.step(0)
    assert not any(span.action.op is Op.I for worker in team.workers for span in worker.events(0))


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("pattern", "pp", "name"),
    [
        ("abca", 2, "1f1b"),
        ("abba", 4, "gpipe"),
        ("abab", 2, "interleaved"),
        ("aba", 1, "1f1b"),
        ("abca", 1, "interleaved"),
    ],
)
def test_tied_weights_in_halves(pattern, pp, name, mode):
    schedule = halved(name, pp, 4, random.Random(3))
    agrees(Team(shared(pattern), pp, 4, schedule, dp=2, **MODES[mode], bucket_mb=1e-4))


def test_an_activation_is_in_flight_until_its_weights_are_done():
    rows = ["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]
    team = Team(linears(4), 2, 2, Schedule.of("late", [row.split() for row in rows]))
    assert [result.in_flight for result in team.step()] == [2, 2]
    for worker in team.workers:
        (stage,) = worker.stages.values()
        assert (stage.in_flight, worker.member.probe.step.values) == ((), {})


def test_the_inputs_gradient_is_there_before_the_weights():
    """What I does: it goes all the way back before any product for a weight of a linear layer."""
    team = Team(linears(4), 2, 1, halved("1f1b", 2, 1))
    (stage,) = team.workers[1].stages.values()
    seen, compute = [], stage.backward_weight
    stage.backward_weight = lambda *key: (seen.append([p.grad for p in stage.parameters().values()]), compute(*key))
    team.step()
    assert seen == [[None] * 4]
    assert all(gradient is not None for gradient in team.gradients().values())


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in SHARED])
def test_buckets_start_in_the_last_half(mode):
    team = Team(linears(4), 2, 3, halved("1f1b", 2, 3), dp=2, **MODES[mode], bucket_mb=1e-6)
    team.step()
    for worker in team.workers:
        spans = worker.events()
        last = [span for span in spans if span.action.op is Op.W][-1]
        (step,) = (span for span in spans if span.action.op is Op.STEP)
        buckets = [span for span in spans if span.bucket is not None]
        assert len(buckets) == len(worker.holds())
        assert all(last.start < span.start < last.end for span in buckets)
        assert all(step.start < span.end <= step.end for span in buckets)


def test_large_gradients_are_made_where_they_are_reduced():
    """Nothing of them is copied."""
    layers = [(4, 1024), (1024, 1024), (1024, 4)]
    team = Team(lambda: [nn.Linear(*sizes) for sizes in layers], 1, 2, dp=2, optim=SGD(lr=1e-3))
    moved = []
    for bucket in team.workers[0].member.parts.reducer.buckets:

        def spy(name, flat, bucket=bucket, move_in=bucket.move_in):
            gradient = bucket.parameters[name].grad.data_ptr()
            move_in(name, flat)
            if bucket.parameters[name].grad.data_ptr() != gradient:
                moved.append(name)

        bucket.move_in = spy
    agrees(team)
    assert moved
    assert "layers.1.weight" not in moved


def test_a_stage_that_has_whole_backwards_and_halves():
    rows = [["0F0", "0F1", "0B0", "0I1", "0W1"], ["1F0", "1I0", "1W0", "1F1", "1B1"]]
    agrees(Team(linears(4), 2, 2, Schedule.of("mixed", rows)), bound=0.0)


@pytest.mark.each_value
@pytest.mark.parametrize("backward", ["auto", "whole", "split"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_what_is_measured_is_the_schedule(name, backward):
    """The spans of every actor are the actions of the checked schedule, in its order, and the bits are the same."""
    team = Team(linears(4), 2, 4, name, dp=2, backward=backward)
    schedule, ops = team.programs["train"], set()
    agrees(team)
    for rank, worker in enumerate(team.workers):
        spans = [span for span in worker.events(0) if span.bucket is None]
        assert tuple(span.action for span in spans) == schedule.rows[team.world.pp(rank)]
        ops |= {span.action.op for span in spans}
    assert (Op.I in ops, Op.B in ops) == (backward != "whole", backward != "split")
    assert {len(row) for row in worker.member.context.plan.programs["train"].rows} == {
        0,
        len(schedule.rows[team.world.pp(rank)]),
    }


def test_hooks_on_weights_are_called_once_a_microbatch():
    team, calls = Team(linears(4), 2, 3, halved("1f1b", 2, 3)), []
    (stage,) = team.workers[1].stages.values()
    stage.modules[0][0].weight.register_hook(lambda gradient: calls.append(tuple(gradient.shape)))
    team.step()
    assert calls == [(4, 4)] * 3
