"""Losses of one's own beside plain torch in float64: what they average over, microbatches and steps without targets."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raypar as rp
from raypar.reporting.report import report_of, reports_of
from tests.support.team import Team

CLASSES, RATE = 5, 0.3
COUNTS = 8, 3, 1, 5, 0, 6, 2, 7


def layers():
    return [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)]


def labelled(ignored, counts=COUNTS):
    """Batches of 8 samples, of which others count in each microbatch."""

    def fn(step, microbatch, dp):
        generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + dp)
        x = torch.randn(8, 4, generator=generator)
        y = torch.randint(1, CLASSES, (8,), generator=generator)
        y[counts[(2 * microbatch + dp + 3 * step) % len(counts)] :] = ignored
        return x, y

    return fn


def without_zeros(target):
    return int((target != 0).sum())


ZEROS = {"loss": partial(F.cross_entropy, ignore_index=0), "count": without_zeros}


def run_of(fn, steps=3, **settings):
    model = {"fn": layers, "loss": F.cross_entropy} | {
        key: settings.pop(key) for key in ("loss", "count") if key in settings
    }
    fields = {"microbatches": 2, "micro_batch_size": 8, "steps": steps, "device": "cpu", "clip": None, "timeout": 20.0}
    return rp.Run(
        model=rp.Layers(**model), data=rp.Batches(fn), **(fields | {"optim": rp.SGD(lr=RATE, momentum=0.0)} | settings)
    )


def trained(team, run):
    """The reports of a run's steps on threads, all of one flush if it has a stream."""
    if not team.programs["train"].stream:
        return [report_of(number, 1.0, team.step(number), team.world) for number in range(run.steps)]
    return reports_of(0, 1.0, team.each(lambda actor: actor.train(0, None, 0, run.steps)), team.world)


def right(first, run, ignored, optimizer=None):
    """Losses and weights by plain torch: the mean of a step is over all its elements that count."""
    weights = {name: weight.double().requires_grad_() for name, weight in first.items()}
    made = (optimizer or partial(torch.optim.SGD, lr=RATE))(weights.values())
    losses = []
    for step in range(run.steps):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for microbatch in range(run.microbatches):
            for dp in range(run.mesh.dp):
                x, y = run.data.fn(step, microbatch, dp)
                hidden = torch.tanh(x.double() @ weights["layers.0.weight"].T + weights["layers.0.bias"])
                logits = hidden @ weights["layers.2.weight"].T + weights["layers.2.bias"]
                total = total + F.cross_entropy(logits, y, ignore_index=ignored, reduction="sum")
                count += int((y != ignored).sum())
        losses.append((total / count).item() if count else None)
        if count:
            made.zero_grad()
            (total / count).backward()
            made.step()
    return losses, weights


def assert_right(run, ignored, optimizer=None, bound=3e-6):
    """Assert that a run on threads has the losses and weights of plain torch; return its reports."""
    team = Team.of(run)
    first = {name: weight.clone() for name, weight in team.weights().items()}
    losses, weights = right(first, run, ignored, optimizer)
    reports = trained(team, run)
    for report, loss in zip(reports, losses, strict=True):
        assert report.loss == (None if loss is None else pytest.approx(loss, rel=3e-6))
    for dp in range(run.mesh.dp if not team.world.gathers else 1):
        for name, weight in team.weights(dp).items():
            moved = (weights[name] - first[name]).abs().max()
            assert (weight - weights[name]).abs().max() <= 1e-3 * moved + bound * 1e-2, name
    return reports


LAYOUTS = {
    "one": {},
    "pipeline": {"mesh": rp.Mesh(pp=2), "microbatches": 4},
    "replicas": {"mesh": rp.Mesh(dp=2), "zero": 0},
    "sharded": {"mesh": rp.Mesh(dp=2), "zero": 3},
    "again": {"recompute": "full"},
    "halves": {"mesh": rp.Mesh(pp=2), "schedule": "zb-h1", "microbatches": 4},
    "servers": {"mesh": rp.Mesh(dp=2), "data_parallel": "parameter_server"},
    "validated": {"mesh": rp.Mesh(pp=2), "microbatches": 4, "flush_every": 4},
}


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
def test_count_says_of_how_many_elements_a_loss_is_the_mean(layout):
    assert_right(run_of(labelled(0), **ZEROS, **LAYOUTS[layout]), 0)


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_microbatch_without_targets_contributes_nothing(layout):
    """The loss of torch is 0 / 0 there."""
    assert_right(run_of(labelled(-100, (8, 0, 3, 5)), **LAYOUTS[layout]), -100)


def without_step_1(step, microbatch, dp):
    x, y = labelled(-100)(step, microbatch, dp)
    return x, torch.full_like(y, -100) if step == 1 else y


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_without_targets_changes_nothing(layout):
    """Neither weights nor moments of the optimizer, which its next step shows."""
    run = run_of(
        without_step_1, steps=4, optim=rp.AdamW(lr=0.05, betas=(0.9, 0.999), weight_decay=0.0), **LAYOUTS[layout]
    )
    reports = assert_right(run, -100, partial(torch.optim.AdamW, lr=0.05, weight_decay=0.0))
    assert [report.skipped for report in reports] == [False, True, False, False]
    assert [report.loss is None for report in reports] == [False, True, False, False]
    assert reports[1].to_dict()["loss"] is None
    assert reports[1].tokens == 0
