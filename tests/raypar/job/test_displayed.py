"""Outcomes of training go to callbacks, and a run in which no step changes a weight is warned of."""

from __future__ import annotations

from dataclasses import replace

import pytest

import raypar as rp
from raypar.job.steps.displayed import displayed
from raypar.reporting.report import Report

STEP = Report(0, 1.5, 0.1, 0.01, 8, 8.0, 1000.0, 0.0, None, (1,), (0,))


def shown(reports, on=None, run=None):
    return displayed(run or rp.Run(steps=4), 4, iter(reports), on)


def test_several_callbacks_are_called_in_their_order():
    seen = []
    calls = [lambda outcome, name=name: seen.append((name, outcome.step)) for name in "ab"]
    reports = [replace(STEP, step=number) for number in range(2)]
    assert shown(reports, calls) == reports
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    shown(reports[:1], calls[0])
    assert seen[4:] == [("a", 0)]


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


FP16 = rp.Run(precision=rp.Precision("fp16"), loss_scale=rp.LossScale(init=2.0**20))


@pytest.mark.parametrize(
    ("changes", "run", "says"),
    [
        (
            {"loss_scale": 64.0},
            FP16,
            "each overflowed in fp16: lower loss_scale.init 1.04858e+06 (64 by now) or optim.lr",
        ),
        ({}, rp.Run(nonfinite="skip"), "no loss or gradient was finite: lower optim.lr"),
        ({"loss": None}, rp.Run(), "no target of theirs counts: correct the targets"),
    ],
)
def test_a_run_in_which_no_step_changes_a_weight_is_warned_of(changes, run, says, caplog):
    skipped = [replace(STEP, step=number, skipped=True, **changes) for number in range(3)]
    shown(skipped, run=run)
    (message,) = warnings_of(caplog)
    assert message.startswith("none of the 3 steps has changed a weight") and says in message
    caplog.clear()
    shown([*skipped, replace(STEP, step=3)], run=run)
    shown([], run=run)
    assert not warnings_of(caplog)
