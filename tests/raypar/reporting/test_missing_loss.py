"""A step or an evaluation without targets has no loss, wherever it is written, read and shown."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

import raypar as rp
from raypar.cli.main import run_command
from raypar.job.steps.evaluation import Evaluations
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.html.figures import History
from raypar.reporting.html.page import page
from raypar.reporting.progress import _figures, evaluation_line
from raypar.reporting.record import Record
from raypar.reporting.report import Report
from raypar.reporting.run_folder.read import read
from raypar.schedules import build, lower

SCHEDULE = lower(build("1f1b", 2, 4))
EVERY = Report(0, 2.5, 1.0, 1e-3, 256, 1e3, 256.0, 0.2, None, (2, 1), (5, 6))
MISSING = replace(EVERY, step=1, loss=None, grad_norm=0.0, lr=0.0, tokens=0, tokens_per_s=0.0, skipped=True)
NONE = Evaluation(2, None, 0, 0.5)


@pytest.fixture
def folder(tmp_path):
    """A folder whose second step and only evaluation have no loss."""
    run = rp.recipe("gpt-tiny", mesh=rp.Mesh(pp=2), microbatches=4, folder=str(tmp_path / "run"))
    record = Record(run)
    record.begin(run, SCHEDULE, 0, "job")
    for outcome in (EVERY, MISSING, replace(MISSING, step=2), NONE):
        record.write(outcome)
    record.close()
    return tmp_path / "run"


def test_it_is_null_in_files_and_missing_in_what_is_drawn(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("loss") for line in lines] == [2.5, None, None, None]
    assert lines[3]["val_loss"] is None
    assert lines[3]["perplexity"] is None
    past = read(folder)
    history = History.of(past)
    assert history.points("loss") == [(1, 2.5)]
    assert history.validation() == []
    assert history.skipped == [2, 3]
    assert "none, for no target counts" in page(past)
    assert run_command(["report", str(folder)]) in (0, None)


def test_it_is_said_once(folder, caplog):
    run = rp.recipe("gpt-tiny", mesh=rp.Mesh(pp=2), microbatches=4)
    record = Record(run)
    with caplog.at_level(logging.WARNING, "raypar"):
        for outcome in (EVERY, MISSING, replace(MISSING, step=2)):
            record.write(outcome)
    (message,) = caplog.messages
    assert message.startswith("step 2: no target of the step counts, so it changed no weight")


def test_it_is_no_number_on_a_line():
    assert "skipped  loss none, for no target counts  grad 0.000" in _figures(MISSING, "tokens")
    assert evaluation_line(NONE) == "after step 2: validation loss none, for no target counts"
    assert "loss=" not in repr(MISSING)
    assert "none, for no target counts" in MISSING._repr_html_()
    assert "none, for no target counts" in NONE._repr_html_()


def test_an_evaluation_without_targets_stops_nothing_early():
    run = rp.recipe("gpt-tiny", eval_every=1, early_stop=1, steps=9)
    evaluations = Evaluations(run)
    assert not evaluations.keep(replace(NONE, step=1))
    assert not evaluations.keep(replace(NONE, step=2, loss=2.0))
    assert not evaluations.keep(replace(NONE, step=3))
    assert "lowest after step 2" in evaluations.keep(replace(NONE, step=4, loss=3.0))
