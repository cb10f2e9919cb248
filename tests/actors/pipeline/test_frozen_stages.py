"""Stages without anything to learn, in them or before them: they get no gradients, and keep nothing for a backward."""

from __future__ import annotations

import pytest
from torch import nn

from raypar.actors.specs.model import Layers
from raypar.schedules.action import Action, Op
from raypar.schedules.schedule import Schedule
from tests.support.replicas import agrees
from tests.support.team import Team, mse


def frozen():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()).requires_grad_(False)


def layers(*learn):
    """Four layers; those that do not learn are frozen, but have running means that change."""
    return lambda: [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) if learns else frozen() for learns in learn]


def sent(team, op):
    """Bytes of the messages of an op, by stage."""
    events = [event for worker in team.workers for event in worker.events()]
    return {stage: sum(e.bytes for e in events if e.action[:2] == (stage, op)) for stage in range(4)}


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("learn", "schedule", "dp", "zero"),
    [
        ((0, 0, 1, 1), "1f1b", 1, 0),
        ((0, 0, 1, 1), "interleaved", 2, 1),
        ((0, 0, 0, 1), "zb-v", 1, 0),
        ((0, 0, 1, 1), "1f1b", 2, 3),
        ((0, 1, 0, 1), "interleaved", 1, 0),
        ((0, 0, 0, 0), "1f1b", 1, 0),
    ],
)
def test_frozen_stages_train_as_in_one_process(learn, schedule, dp, zero, recompute):
    model = Layers(layers(*learn), mse, halves=True)
    team = Team(None, 2, 4, schedule, dp=dp, zero=zero, model=model, recompute=recompute)
    agrees(team, 1e-5)


def test_no_gradient_is_sent_to_them_and_they_keep_nothing():
    team = Team(layers(0, 0, 1, 1), 4, 4)
    team.step()
    assert [bool(size) for size in sent(team, Op.SEND_F).values()] == [True, True, True, False]
    assert [bool(size) for size in sent(team, Op.SEND_B).values()] == [False, False, False, True]
    in_flight = [result.in_flight for result in team.step(1)]
    assert in_flight[:2] == [0, 0]
    assert all(in_flight[2:])


class Borrows(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.others = [other]

    def forward(self, x):
        return x @ self.others[0].weight


def test_what_a_frozen_stage_borrows_learns():
    """The first layer has no parameters of its own, and uses the weight of a later one on the same actor."""

    def made():
        last = nn.Linear(4, 4)
        return [Borrows(last), nn.Linear(4, 4).requires_grad_(False), nn.Tanh(), last]

    agrees(Team(made, 2, 4, "zb-v", steps=2))


def test_a_step_by_hand_shows_that_they_have_no_gradients():
    row = ["0F0", "1F0", "2F0", "3F0", "3B0", "2B0", "1B0", "0B0"]
    team = Team(layers(0, 0, 1, 1), 1, 1, Schedule.of("one rank", [row]))
    (worker,) = team.workers
    worker.member.open(0)
    for action in team.programs["train"].rows[0]:
        worker.member.perform(action)
    seen = {name: worker.member.probe.peek(Action.parse(name), tensors=True).tensors for name in ("3B0", "2B0", "1B0")}
    assert [len(tensors) for tensors in seen.values()] == [1, 0, 0]
    worker.member.end()
