"""When the evaluations of a run end its training."""

from __future__ import annotations

import json
import math

import pytest

import raypar as rp
from raypar.config.conflicts.parallel import idle_fields
from raypar.job.steps.evaluation import Evaluations
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.record import Record


def stops(losses, early_stop):
    """Return the number of evaluations after which training ends, each after ten steps; None if it goes on."""
    evaluations = Evaluations(rp.Run(eval_every=10, early_stop=early_stop))
    told = [evaluations.keep(Evaluation(10 * (number + 1), loss, 1, 0.0)) for number, loss in enumerate(losses)]
    return next((number for number, text in enumerate(told, 1) if text), None)


@pytest.mark.parametrize(
    "losses, early_stop, ends",
    [
        ([3.0, 2.0, 1.0, 0.5], 1, None),
        ([3.0, 3.0, 3.0], 1, 2),
        ([3.0, 2.0, 2.5, 1.9, 2.0, 1.95], 2, 6),
        ([3.0, 2.0, 2.5, 2.4], 3, None),
        ([3.0, math.nan, math.nan], 2, 3),
        ([math.nan, 3.0, 2.0], 2, None),
        ([3.0, 4.0, 5.0], 0, None),
    ],
)
def test_training_ends_so_many_evaluations_after_the_lowest_loss(losses, early_stop, ends):
    assert stops(losses, early_stop) == ends


def test_the_end_says_when_the_loss_was_lowest():
    evaluations = Evaluations(rp.Run(eval_every=5, early_stop=1))
    assert evaluations.keep(Evaluation(5, 2.0, 1, 0.0)) == ""
    told = evaluations.keep(Evaluation(10, 2.5, 1, 0.0))
    ends = "and early_stop is 1: the training ends after step 10"
    assert told == f"the validation loss was lowest after step 5, 2.0000, {ends}"


def test_a_resume_counts_the_evaluations_before_it(tmp_path):
    lines = [{"step": 5, "val_loss": 2.0}, {"step": 7, "val_loss": 1.0}, {"step": 10, "val_loss": "NaN"}]
    later = [{"step": 15, "val_loss": 0.1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines + later))
    run = rp.Run(eval_every=5, early_stop=2, folder=str(tmp_path))
    evaluations = Evaluations(run)
    evaluations.begin(Record(rp.Run()).validation_losses(run, 10))
    assert "lowest after step 5" in evaluations.keep(Evaluation(15, 2.5, 1, 0.0))


def test_early_stop_without_evaluations_has_no_effect_and_that_is_said():
    assert "early_stop 2 has no effect without eval_every: give it, or leave early_stop out" in [
        *idle_fields(rp.Run(early_stop=2))
    ]
