"""What is shown while a run goes on."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from raypar.actors.specs.run import Run
from raypar.planner.utilisation import Utilisation
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.progress import display
from raypar.reporting.report import Report
from raypar.reporting.summary import steps_text

REPORT = Report(0, 2.53591, 0.12345, 1e-3, 256, 2503.4, 1500.0, 0.147, None, (2, 1), (558 << 20, 515 << 20))


@pytest.fixture
def lines(caplog):
    """Show outcomes of a run; returns the lines."""

    def show(steps, *outcomes):
        caplog.clear()
        with caplog.at_level(logging.INFO), display(Run(), steps) as show_one:
            for outcome in outcomes:
                show_one(outcome)
        return [record.getMessage() for record in caplog.records]

    return show


def test_a_line_has_what_one_wants_to_know(lines):
    assert lines(42, REPORT, Evaluation(1, 2.5, 64, 0.5)) == [
        "step  1/42  loss 2.5359  grad 0.123  2,503 tokens/s  bubble 15%  0.54 GiB  0:01:02 left",
        "after step 1: validation loss 2.5000, perplexity 12.18",
    ]


def test_a_line_has_the_utilisation_where_it_is_known(lines):
    seen = replace(REPORT, samples=3).rated(Utilisation(0.2, 0.25))
    assert (seen.mfu, seen.hfu) == (pytest.approx(0.4), pytest.approx(0.5)), "of 3 samples in 1.5 s"
    assert "  2,503 tokens/s  MFU 40.0%, HFU 50.0%  bubble 15%  " in lines(42, seen)[0]
    assert "  MFU 40.0%  bubble" in lines(42, replace(seen, hfu=seen.mfu))[0], "nothing is recomputed"
    assert "MFU 40.0%" in repr(seen) and "MFU 40.0%, HFU 50.0%" in seen._repr_html_()
    assert seen.to_dict()["mfu"] == seen.mfu and replace(seen, by_hand=True).to_dict()["mfu"] is None
    assert REPORT.rated(None) is REPORT and REPORT.to_dict()["mfu"] is None


def test_throughput_is_in_the_users_unit(caplog):
    with caplog.at_level(logging.INFO), display(Run(unit="images"), 42) as show:
        show(replace(REPORT, samples=6))
    assert "  4 images/s  " in caplog.text


def test_what_is_left_goes_by_the_median_step(lines):
    slow = [replace(REPORT, step=step, step_ms=1e6 if step == 0 else 2e3) for step in range(4)]
    assert [line.split("  ")[-1] for line in lines(4, *slow)] == [
        "0:50:00 left", "0:16:42 left", "0:00:02 left", "0:00:00 left",
    ]  # fmt: skip


def test_a_line_is_short(lines):
    worst = replace(
        REPORT, step=999_998, loss=-1.23456e30, grad_norm=1e38, tokens_per_s=1234567.8, bubble=1.0,
        step_ms=1e7, peak_memory=(80 << 30,),
    )  # fmt: skip
    (line,) = lines(999_999, worst)
    assert len(line) < 110
    (line,) = lines(999_999, replace(worst, step=0, loss=-1234.5678, grad_norm=1234.5678, step_ms=300.0))
    assert len(line) < 110


def test_steps_beyond_a_runs_own_are_told_as_such():
    assert steps_text(3, 4) == "3 of 4 steps taken"
    assert steps_text(102, 4) == "102 steps taken, 98 more than the run's 4"
