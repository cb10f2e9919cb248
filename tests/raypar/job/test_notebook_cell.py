"""A training in a cell of a notebook: one output that is drawn anew, seldom, and whose last state stays."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import raypar as rp
from raypar.job.steps import notebook_cell
from raypar.job.steps.displayed import displayed
from raypar.job.steps.notebook_cell import TrainingCell
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.report import Report

STEP = Report(0, 1.5, 0.1, 0.01, 8, 8.0, 1000.0, 0.25, None, (1,), (1 << 20,))
RUN = rp.Run(steps=4)


def steps(*losses):
    return [replace(STEP, step=number, loss=loss) for number, loss in enumerate(losses)]


@pytest.fixture
def drawings(monkeypatch):
    """A stand-in for a kernel of IPython: what it displays, and what that is replaced by."""
    drawn = []

    def display(shown, display_id):
        assert display_id
        drawn.append(shown._repr_html_())
        return SimpleNamespace(update=lambda shown: drawn.append(shown._repr_html_()))

    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    return drawn


def test_one_output_shows_the_bar_the_curve_and_the_time_left(drawings, monkeypatch, capsys):
    monkeypatch.setattr(notebook_cell, "_SECONDS", 0.0)
    monkeypatch.setattr(notebook_cell, "_SHARE", 1e9)
    outcomes = [*steps(3.0, 2.0), Evaluation(2, 2.5, 8, 0.1), *steps(3.0, 2.0, 1.5, 1.25)[2:]]
    reports = displayed(RUN, 4, outcomes, None)
    begun, *_, last = drawings
    assert len(drawings) == 1 + 5 + 1
    assert "<svg" not in begun and "width: 0.0%" in begun and "<b>0/4</b>" in begun
    assert "width: 25.0%" in drawings[1] and "left <b>3.0 s</b>" in drawings[1]
    assert "width: 100.0%" in last and "<b>4/4</b>" in last and "took <b>" in last and "left <b>" not in last
    assert "validation loss" in last and "after step 2: validation loss 2.5000" in last
    assert [report.loss for report in reports] == [3.0, 2.0, 1.5, 1.25]
    assert capsys.readouterr() == ("", "")


def test_it_is_drawn_seldom(drawings):
    displayed(replace(RUN, steps=500), 500, steps(*[1.0] * 500), None)
    assert len(drawings) < 10


def test_what_ends_early_keeps_its_last_state(drawings):
    def ends():
        yield from steps(3.0, 2.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        displayed(RUN, 4, ends(), None)
    assert "<b>2/4</b>" in drawings[-1] and "took <b>" in drawings[-1]


def test_log_lines_are_not_red(drawings, monkeypatch, capsys):
    monkeypatch.setattr("raypar.reporting.progress.heard", lambda: False)

    def warns():
        yield from steps(3.0)
        logging.getLogger("raypar").warning("a note of the run")

    displayed(replace(RUN, steps=1), 1, warns(), None)
    assert capsys.readouterr() == ("a note of the run\n", "")


def test_no_finite_loss_and_names_with_markup():
    cell = TrainingCell(2, "<b>words</b>")
    cell.add(replace(STEP, loss=None))
    cell.add(replace(STEP, step=1, loss=float("nan")))
    html = cell._repr_html_()
    assert "No figures." in html and "<b>words" not in html and "&lt;b&gt;words" in html
    assert repr(cell).startswith("step 2/2  loss ")


def test_a_step_that_is_taken_again_replaces_its_first_report():
    again, once = TrainingCell(2, "tokens"), TrainingCell(2, "tokens")
    for report in (*steps(3.0, 9.0), replace(STEP, step=1, loss=2.0)):
        again.add(report)
    for report in steps(3.0, 2.0):
        once.add(report)
    assert again._curves() == once._curves()
