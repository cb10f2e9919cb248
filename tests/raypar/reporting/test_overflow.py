"""Counts of overflow in reports and metrics, and the warnings that they lead to."""

import json
import logging
from dataclasses import replace

import torch
from torch import nn

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import World
from raypar.actors.specs.results import RangeCount, StepResult
from raypar.actors.specs.run import Run
from raypar.config.toml import plain_of
from raypar.reporting.overflow import LayerCount, Overflow, OverflowWarnings, joined_overflow
from raypar.reporting.record import Record
from raypar.reporting.report import report_of
from raypar.reporting.trackers.tracker import scalars
from tests.support.team import Team

NOTHING = StepResult((2.0,), (4,), 1.0, 0.1, 1.0, 0.0, 2.0, None, 1, 0)


def world(**axes):
    return World.of(Mesh(**axes), "all_reduce", 1, 0)


def counts(*shares, kind="activations"):
    """Four layers with a share of overflow each."""
    made = [LayerCount(f"blocks.{n}", kind, 3, "pp=0", 1000, round(1000 * s), 0) for n, s in enumerate(shares)]
    return Overflow("fp16", tuple(made))


def warned(*steps):
    rule = OverflowWarnings()
    return [list(rule.of(number, counts(share))) for number, share in enumerate(steps, start=1)]


def test_under_one_per_cent_and_not_rising_is_safe():
    assert warned(0.0, 0.0, 0.0) == [[], [], []]
    assert warned(0.005, 0.005, 0.004) == [[], [], []]


def test_a_share_that_rises_is_named_with_layer_step_and_share():
    first, second = warned(0.0, 0.002)
    assert first == []
    assert second == [
        "step 2: 0.2 % of the activations of blocks.0 overflow fp16 (most of them in microbatch 3, on actor pp=0), up "
        "from 0 %. Safe is under 1 % and not rising"
    ]


def test_a_layer_is_named_once_until_it_rises_again():
    told = warned(0.02, 0.02, 0.015, 0.015, 0.03, 0.03)
    assert [len(each) for each in told] == [1, 0, 0, 0, 1, 0]


def test_counts_of_actors_are_joined_in_the_order_of_layers():
    later = RangeCount(1, "blocks.1", "activations", 0, (0,), 10, 2, 1)
    first = RangeCount(0, "blocks.0", "activations", 0, (0, "left"), 10, 1, 0)
    half = first._replace(part=(0, "right"), over=4)
    results = [replace(NOTHING, ranges=(later, first)), replace(NOTHING, ranges=(later, half))]
    found = joined_overflow(results, world(tp=2), "fp16")
    one, two = found.layers()
    assert one == ("blocks.0", "activations", 0, "pp=0 tp=1", 20, 5, 0)
    assert two == ("blocks.1", "activations", 0, "pp=0 tp=0", 10, 2, 1)
    assert (two.overflow, two.underflow) == (0.2, 0.1)
    assert joined_overflow([NOTHING], world(), "fp16") is None
    assert "20 % of the activations of blocks.1" in repr(Overflow("fp16", (two,)))


class Grow(nn.Module):
    """Outputs that grow with every step: the layer's share of overflow rises while the loss stays finite."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.weight * 10.0**self.calls


class Shrink(Grow):
    """The next layer, which makes them as small as before."""

    def forward(self, x):
        self.calls += 1
        return x * self.weight * 10.0**-self.calls


def test_a_warning_names_the_layer_while_the_loss_is_finite(tmp_path, caplog):
    team = Team(lambda: [nn.Linear(4, 4), Grow(), Shrink()], pp=1, m=1, overflow_every=1, steps=7)
    run = replace(team.run, folder=str(tmp_path / "run"), model=Run().model, data=Run().data)
    record = Record(run)
    record.begin(run, team.programs["train"], 0, "t")
    with caplog.at_level(logging.WARNING):
        for step in range(7):
            report = report_of(step, 1.0, team.step(step), team.world)
            record.write(report)
            assert report.loss < 10
    record.close()
    told = [entry.getMessage() for entry in caplog.records]
    assert told
    assert all("of the activations of" in text and "1 overflow fp16" in text for text in told)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    worst = max(lines[-1]["overflow"]["layers"], key=lambda one: one["over"])
    assert (worst["kind"], worst["microbatch"], worst["values"]) == ("activations", 0, 12)
    assert "overflow" not in scalars(lines[-1])


def test_the_fields_are_known():
    assert plain_of(Run(overflow_every=10, overflow_format="bf16"))["overflow_format"] == "bf16"
