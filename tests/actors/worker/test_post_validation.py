"""Synchronous steps without a flush: updates are validated later, and wrong ones leave no bit behind."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.specs.model import Layers
from raypar.reporting.report import reports_of
from raypar.schedules.action import Op
from tests.support.team import Local, Team

STEPS, FLUSH, RANKS, MICROBATCHES = 6, 3, 3, 5
OPTIMIZERS = {"adamw": rp.AdamW(lr=0.01), "sgd": rp.SGD(lr=0.05, momentum=0.9), "muon": rp.Muon(lr=0.02, adamw=())}


class Bump(torch.autograd.Function):
    """Adds nothing, and gives a parameter a gradient of some size where the marker of the batch is the layer's."""

    @staticmethod
    def forward(ctx, x, weight, marker, size):
        ctx.gradient = torch.full_like(weight, size if marker else 0.0)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, ctx.gradient, None, None


class Layer(nn.Module):
    """A layer whose first column is the batch's marker, the number of the layer that gets a large gradient."""

    def __init__(self, number, size):
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.bump, self.number, self.size = nn.Parameter(torch.zeros(1)), number, size

    def forward(self, x):
        y = torch.tanh(self.norm(self.lin(x[:, 1:])))
        marker = bool((x[:, 0] == self.number).all())
        return torch.cat([x[:, :1], Bump.apply(y, self.bump, marker, self.size)], 1)


def loss(output, target):
    return nn.functional.mse_loss(output[:, 1:], target)


def marked(bad, layer):
    """Batches with a layer's marker in the last microbatch of some steps."""

    def data(step, microbatch, dp):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + microbatch + 7 * dp))
        x[:, 0] = layer if step in bad and microbatch == MICROBATCHES - 1 else -1
        return x, x[:, 1:].sin()

    return data


def team_of(size, bad, layer, **changes):
    model = Layers(lambda: [Layer(number, size) for number in range(RANKS)], loss, halves=True)
    fields = {"schedule": "zb-h2", "data": marked(bad, layer), "steps": STEPS, "zero": 0, "model": model, "ema": 0.9}
    return Team(None, RANKS, MICROBATCHES, **fields | changes)


def trained(team):
    """The updates that a team told, its weights, optimizer states, buffers and numbers of messages."""
    updates = []
    every = team.run.flush_every or 1
    for first in range(0, STEPS, every):
        results = team.each(lambda actor, first=first: actor.train(first, None, 0, every if every > 1 else 0))
        for result in results:
            if isinstance(result, Exception):
                raise result
        norms = [report.grad_norm for report in reports_of(first, 1.0, results, team.world)]
        assert norms == [one.grad_norm for one in results[0].updates] or every == 1
        updates += results[0].updates or [
            (results[0].grad_norm, results[0].lr, results[0].scale, results[0].is_skipped)
        ]
    kept = {}
    for actor in team.workers:
        kept |= {(name, key): one.clone() for name, key, one in actor.member.state.update.state()}
        kept |= {(name, "buffer"): one.clone() for name, one in actor.member.state.buffers()}
    sends = sum(table["send"][0] for table in team.ledger("pp") if "send" in table)
    return [tuple(one[:4]) for one in updates], kept, sends


def equal(ours, theirs):
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    for name, one in ours[1].items():
        assert torch.equal(one, theirs[1][name]), name


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("optim", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("layer", range(RANKS))
def test_a_clip_of_any_stage_has_the_bits_of_the_flushed_optimizer(layer, optim):
    changes = {"optim": optim, "clip": 10.0}
    flushed = trained(team_of(100.0, {0, 2, 4}, layer, **changes))
    assert [norm > 10 for norm, *_ in flushed[0]] == [True, False, True, False, True, False]
    ours = trained(team_of(100.0, {0, 2, 4}, layer, flush_every=FLUSH, **changes))
    equal(ours, flushed)
    assert ours[2] > flushed[2], "forwards came again"


@pytest.mark.sampled
@pytest.mark.parametrize("layer", range(RANKS))
def test_an_overflow_of_any_stage_is_skipped_by_all(layer):
    changes = {"optim": OPTIMIZERS["adamw"], "nonfinite": "skip", "clip": 10.0}
    flushed = trained(team_of(float("inf"), {1, 2}, layer, **changes))
    assert [skipped for *_, skipped in flushed[0]] == [False, True, True, False, False, False]
    equal(trained(team_of(float("inf"), {1, 2}, layer, flush_every=FLUSH, **changes)), flushed)


def test_an_overflow_of_fp16_lowers_the_scale_of_the_loss():
    changes = {"precision": rp.Precision("fp16"), "loss_scale": rp.LossScale(init=2.0**10, window=2), "clip": 1.0}
    flushed = trained(team_of(float("inf"), {1}, 0, **changes))
    assert [scale for _, _, scale, _ in flushed[0]] == [1024.0, 1024.0, 512.0, 512.0, 1024.0, 1024.0]
    equal(trained(team_of(float("inf"), {1}, 0, flush_every=FLUSH, **changes)), flushed)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-1p"])
def test_steps_without_a_flush_have_the_bits_of_flushed_ones(name):
    for changes in {"clip": None}, {"clip": 0.5}:
        one, two = (
            team_of(1.0, (), 0, schedule=name, backward="whole", flush_every=n, **changes) for n in (None, FLUSH)
        )
        equal(trained(two), trained(one))


def test_right_updates_are_made_once():
    one, two = (team_of(1.0, (), 0, clip=1e3, flush_every=n) for n in (None, FLUSH))
    flushed, ours = trained(one), trained(two)
    equal(ours, flushed)
    assert ours[2] == flushed[2]
    row = two.programs["train"].rows[0]
    ahead = [action.op for action in row[row.index(next(a for a in row if a.op is Op.STEP)) :]]
    assert ahead[: ahead.index(Op.VALIDATE)].count(Op.F) == RANKS - 1


@pytest.mark.long
def test_replicas_and_shorter_streams():
    changes = {"clip": 10.0, "dp": 2}
    equal(trained(team_of(100.0, {1}, 1, flush_every=2, **changes)), trained(team_of(100.0, {1}, 1, **changes)))
    team, flushed = (team_of(100.0, {1}, 1, clip=10.0, flush_every=n) for n in (4, None))
    for first, count in (0, 2), (2, 1), (3, 3):
        found = team.each(partial(Local.run, program="train", step=first, epoch=None, copy_within=0, stream=count))
        assert not [one for one in found if isinstance(one, Exception)], found
    trained(flushed)
    assert all(torch.equal(one, flushed.weights()[name]) for name, one in team.weights().items())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"schedule": "zb-v"},
            "and without a flush each rank has one: set schedule to 'zb-h2', say",
        ),
        (
            {"order": "dynamic", "executor": "tasks"},
            "in schedule 'zb-h2' with flush_every=3 every stage updates by itself",
        ),
        ({"device": "cuda"}, "flush_every is 3, but messages of NCCL have no tags on GPUs, and forwards come again"),
        ({"delay_feedback": True}, "delay_feedback is True, but in schedule 'zb-h2' no gradient is late: leave it out"),
    ],
)
def test_what_does_not_go_without_a_flush_is_told(changes, says):
    run = replace(team_of(1.0, (), 0, flush_every=FLUSH).run, **changes)
    assert [one for one in rp.faults(run) if says in one], rp.faults(run)
