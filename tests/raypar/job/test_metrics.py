"""The user's metrics: evaluations return them, weighted as the loss is, on every layout."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import raypar as rp
from raypar.job.steps.evaluation import Evaluations
from raypar.reporting.html.page import page
from raypar.reporting.progress import evaluation_line
from raypar.reporting.run_folder.read import read
from raypar.reporting.trackers.tracker import scalars
from tests.support.own_layers import cross_entropy
from tests.support.team import Team

CLASSES, STEPS = 5, 2


def layers():
    return [nn.Linear(6, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, CLASSES)]


def batch(step, microbatch, dp):
    """Sequences, of which the last labels do not count, in unequal numbers; none at all of one microbatch."""
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + dp)
    x = torch.randn(3, 4, 6, generator=generator)
    y = torch.randint(CLASSES, (3, 4), generator=generator)
    y[:, 1 + (step + microbatch + dp) % 4 :] = -100
    if microbatch == 1 and dp == 0:
        y[:] = -100
    return x, y


def accuracy(output, target):
    """A mean over what the loss counts."""
    counts = target != -100
    return (output.argmax(-1) == target)[counts].float().mean()


def large(output, target):
    """A sum over all places, and their number."""
    return (output.abs().amax(-1) > 1).sum(), output[..., 0].numel()


METRICS = {"accuracy": accuracy, "large outputs": large, "rows": lambda output, target: (len(output), 1)}
MODEL = rp.Layers(layers, cross_entropy, metrics=METRICS)
RUN = rp.Run(
    model=MODEL,
    mesh=rp.Mesh(),
    data=rp.Batches(batch, batch),
    optim=rp.SGD(lr=0.1),
    microbatches=4,
    eval_steps=STEPS,
    steps=2,
    timeout=20.0,
)
LAYOUTS = {
    "one actor": {},
    "pipeline": {"mesh": rp.Mesh(pp=3)},
    "replicas": {"mesh": rp.Mesh(dp=2), "microbatches": 2},
    "both, gathered weights": {"mesh": rp.Mesh(pp=2, dp=2), "microbatches": 2, "zero": 3},
    "tensor ranks": {
        "mesh": rp.Mesh(tp=2),
        "model": replace(MODEL, plan={"layers.0": "column", "layers.1.1": "row"}),
    },
    "half precision": {"precision": rp.Precision("bf16")},
}


def evaluated(run):
    team = Team.of(run)
    evaluations = Evaluations(run)
    return evaluations.take(0, None, lambda number: team.step(number, "evaluate")), team


def plainly(run, weights):
    """The metrics of all validation data in plain torch."""
    modules = nn.Sequential(*layers())
    modules.load_state_dict({name.removeprefix("layers."): weight for name, weight in weights.items()})
    numbers = [(s, mb, dp) for s in range(STEPS) for mb in range(run.microbatches) for dp in range(run.mesh.dp)]
    pairs = [batch(*number) for number in numbers]
    pairs = [(modules(x), y) for x, y in pairs if (y != -100).any()]
    outputs, targets = (torch.cat(one) for one in zip(*pairs, strict=True))
    right = (outputs.argmax(-1) == targets)[targets != -100]
    return {
        "accuracy": right.double().mean().item(),
        "large outputs": (outputs.abs().amax(-1) > 1).double().mean().item(),
        "rows": 3.0,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_those_of_all_data(layout):
    run = replace(RUN, **LAYOUTS[layout])
    found, team = evaluated(run)
    wanted = plainly(run, {name: weight.float() for name, weight in team.weights().items()})
    assert found.metrics == pytest.approx(wanted, rel=0.05 if layout == "half precision" else 1e-6)
    assert 0 < found.metrics["accuracy"] < 1


def test_training_does_not_compute_them():
    def never(output, target):
        raise AssertionError("in a training step")

    team = Team.of(replace(RUN, model=replace(MODEL, metrics={"never": never})))
    assert all(result.metrics == () for result in team.step(0))


def test_without_targets_there_are_none():
    def empty(*at):
        x, y = batch(*at)
        return x, torch.full_like(y, -100)

    found, _ = evaluated(replace(RUN, data=rp.Batches(batch, empty)))
    assert found.loss is None
    assert dict(found.metrics) == dict.fromkeys(METRICS)
    assert evaluation_line(found).endswith(", accuracy no targets, large outputs no targets, rows no targets")


def test_trackers_get_them():
    found, _ = evaluated(RUN)
    assert {f"eval/{name}" for name in METRICS} < {*scalars(found.to_dict())}


def test_one_that_is_nan_is_told_as_such():
    found, _ = evaluated(replace(RUN, model=replace(MODEL, metrics={"gap": lambda output, target: float("nan")})))
    assert str(found.metrics["gap"]) == "nan"


def test_numbers_keep_their_digits():
    metrics = {
        "python": lambda output, target: (16777217.0, 1),
        "numpy": lambda output, target: (np.float32(0.5), np.int64(1)),
        "above": lambda output, target: float("inf"),
    }
    found, _ = evaluated(replace(RUN, model=replace(MODEL, metrics=metrics)))
    assert dict(found.metrics) == {"python": 16777217.0, "numpy": 0.5, "above": float("inf")}


@pytest.mark.parametrize(
    "wrong", [lambda output, target: output.sub_(1).mean(), lambda output, target: target.zero_().sum()]
)
def test_a_metric_that_writes_into_what_others_read_is_refused(wrong):
    (fault,) = rp.faults(replace(RUN, model=replace(MODEL, metrics={"own": wrong})))
    assert "the metric 'own' writes into the output or the target: let it make new tensors" in fault


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"loss": accuracy}, "model.metrics has 'loss', which is no name for a metric: give one that no other figure"),
        ({"a": lambda output: 1}, "model.metrics: 'a' can't be called with (output, target): give a function of these"),
        ({"a": 5}, "model.metrics['a'] is 5: it must be a function"),
        ([accuracy], "model.metrics is ["),
        (
            {"a": accuracy, "b": lambda output, target: output},
            "model.metrics: 'b' fails with outputs and targets like those of the first batch: the metric 'b' returns",
        ),
        ({"c": lambda output, target: target.nothing}, "model.metrics: 'c' fails with outputs and targets like those"),
    ],
    ids=["taken name", "one argument", "no function", "no mapping", "no number", "fails"],
)
def test_what_is_wrong_is_found_before_a_launch(metrics, says):
    (fault,) = rp.faults(replace(RUN, model=replace(MODEL, metrics=metrics)))
    assert fault.startswith(says), fault


def test_they_are_in_the_log_the_report_and_the_record(job_on, tmp_path, caplog):
    caplog.set_level(logging.INFO, "raypar")
    run = replace(RUN, mesh=rp.Mesh(dp=2), microbatches=2, eval_every=1, steps=3, folder=str(tmp_path / "run"))
    with_folder = job_on(2)
    with_folder.reset(run)
    with_folder.train(3)
    lines = [line for line in read(tmp_path / "run").metrics if "val_loss" in line]
    assert [sorted(line["metrics"]) for line in lines] == [sorted(METRICS)] * 2
    assert caplog.text.count(", accuracy 0.") == 2
    assert ">large outputs<" in page(read(tmp_path / "run"))
