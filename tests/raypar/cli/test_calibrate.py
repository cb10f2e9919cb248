"""``raypar calibrate``: its mistakes, and what it says of what was measured."""

from __future__ import annotations

import os

from raypar.cli.calibrate import calibration_lines
from raypar.planner.calibrated.calibration_file import VARIABLE, read_calibration
from tests.raypar.planner.test_calibration import known


def test_a_short_time_is_told_with_what_it_may_be(said):
    code, _, errors = said("calibrate", "--seconds", "1")
    assert code == 2 and "--seconds is 1: give 10 to 3600" in errors


def test_without_a_place_nothing_is_measured(said):
    code, _, errors = said("calibrate")
    assert code == 2 and "give --out FILE" in errors


def test_a_place_that_can_t_be_written_is_told_before_anything_is_measured(said, monkeypatch, tmp_path):
    measured = []
    monkeypatch.setattr("raypar.calibration.calibrate.calibrate", lambda seconds, say: measured.append(seconds))
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    wrong = {"file/mine.json": "can't be written (", ".": "a folder: give a file", "pipe": "a device or a pipe"}
    for path, words in wrong.items():
        code, _, errors = said("calibrate", "--out", str(tmp_path / path))
        assert (code, measured) == (2, []) and words in errors
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_what_was_measured_is_written_where_predictions_look(said, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine.json"))
    monkeypatch.setattr("raypar.calibration.calibrate.calibrate", lambda seconds, say: known())
    code, out, _ = said("calibrate")
    assert code == 0 and "products up to 20 GFLOP/s" in out and "mine.json" in out
    assert read_calibration(tmp_path / "mine.json") == known()
    assert "all_reduce of 8 MiB among 2: 0.99 GB/s" in calibration_lines(known())
