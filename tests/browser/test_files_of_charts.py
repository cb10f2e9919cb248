"""The button CSV of each chart of a report: what it saves."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest

from raypar.reporting.html.compare import comparison
from raypar.reporting.html.page import page
from tests.raypar.reporting.html.test_report import past, report
from tests.support.browser import chromium

pytestmark = pytest.mark.long

PLACES = ["step", "tokens seen", "time in steps (s)"]


@pytest.fixture
def saved(tmp_path):
    """A function that presses all buttons of a page, and returns the rows of each file by its name."""
    from playwright.sync_api import sync_playwright

    def press(text):
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        found = {}
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
            opened = browser.new_page(accept_downloads=True)
            opened.goto((tmp_path / "page.html").as_uri())
            for button in opened.query_selector_all("button.save"):
                with opened.expect_download() as download:
                    button.click()
                rows = csv.reader(Path(download.value.path()).read_text(encoding="utf-8").splitlines())
                found[download.value.suggested_filename] = [*rows]
            browser.close()
        return found

    return press


def test_a_file_has_a_column_for_each_line_with_its_unit(saved):
    files = saved(page(past()))
    losses = ["Loss: train, smoothed (nats)", "Loss: train, every step (nats)", "Loss: validation (nats)"]
    assert files["loss.csv"][0] == [*PLACES, *losses]
    assert files["bubble.csv"][0] == [*PLACES, "bubble (share of 1)"]
    assert files["tokens-s.csv"][0] == [*PLACES, "tokens/s"]
    first, *_, last = files["loss.csv"][1:]
    assert first[:3] == ["1", "4096", "1.6"] and first[4:] == ["5", ""], "no validation after step 1"
    assert last[0] == "4" and last[5] == "1.5"
    assert all(len(row) == len(rows[0]) for rows in files.values() for row in rows)


def test_a_file_of_a_long_run_has_all_lines_at_each_of_its_steps(saved):
    losses = [5.0 / (step + 1) + math.sin(37 * step) for step in range(2_000)]
    head, *rows = saved(page(past(metrics=[report(step, loss=loss) for step, loss in enumerate(losses)])))["loss.csv"]
    assert head[3:] == ["Loss: train, smoothed (nats)", "Loss: train, every step (nats)"]
    assert 600 <= len(rows) < 2_000 and all(row[3] and row[4] for row in rows)
    assert {min(losses), max(losses)} <= {float(row[4]) for row in rows}, "none of the peaks is lost"


def test_a_comparison_has_a_column_for_each_run(saved):
    short = past(metrics=past().metrics[:2])
    files = saved(comparison([past(), replace(short, folder=Path('/runs/a, "b"'))]))
    head, *rows = files["train-loss-smoothed.csv"]
    assert head == [*PLACES, "Train loss, smoothed: first (nats)", 'Train loss, smoothed: a, "b" (nats)']
    assert [row[0] for row in rows] == ["1", "1", "2", "2", "3", "4"]
    assert {bool(row[3]) ^ bool(row[4]) for row in rows} == {True}, "a row is of one run, whose time it has"
