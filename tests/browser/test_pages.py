"""Pages that raypar writes, opened: reports, galleries, comparisons, pictures of schedules, and the notebook."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from raypar.cli.main import run_command
from raypar.reporting.html.compare import comparison
from raypar.reporting.html.page import page
from tests.raypar.reporting.html.test_experts import lines
from tests.raypar.reporting.html.test_report import past
from tests.support.browser import SCHEMES, dead_links, examined
from tests.support.notebooks import page_of

pytestmark = pytest.mark.long

TOUR = Path(__file__).parents[2] / "examples/tour.ipynb"
NOT_OURS = ".highlight, .jp-InputPrompt, .jp-OutputPrompt"  # code and numbers of cells, as nbconvert shows them


def look_at(*urls, **words):
    """Fail with what is wrong with pages, and their dead links."""
    pages = examined(urls, **words)
    dead = dead_links(pages, Path("/"))
    faults = [f"{url}: {fault}" for url, page in pages.items() for fault in (*page.faults, *dead[url])]
    assert not faults, "\n" + "\n".join(faults)


def test_reports(written):
    full = past(
        metrics=[*past().metrics, *lines()],
        log=["2026-11-24T09:54:26+0000 WARNING the grad norm of step 3 is 40 times that of step 2"],
        provenance={"raypar": "0.1.0", "command": "raypar train gpt-small " + "--steps 40 " * 30},
    )
    poor = past(metrics=[], schedule=None, step=None, timelines=[], ledger={}, checkpoints=[])
    long = replace(full, folder=Path("/runs/" + "a-long-name" * 20))
    shown = {"full": page(full), "poor": page(poor), "two": comparison([full, long, poor])}
    look_at(*(written(f"{name}.html", text) for name, text in shown.items()))


def test_galleries_and_comparisons_of_schedules(tmp_path):
    gallery, both = tmp_path / "gallery.html", tmp_path / "both.html"
    assert run_command(["gallery", "-o", str(gallery)]) == 0
    assert run_command(["compare", "1f1b", "zb-v", "pipedream", "-o", str(both)]) == 0
    look_at(gallery.as_uri(), both.as_uri())


def test_pictures_of_schedules(tmp_path):
    drawn = ("interleaved", "1f1b --lowered", "zb-v --ranks 16 --microbatches 32")
    files = [tmp_path / f"{number}.svg" for number in range(len(drawn))]
    for words, file in zip(drawn, files, strict=True):
        assert run_command(["draw", *words.split(), "--out", str(file)]) == 0
    look_at(*(file.as_uri() for file in files))


def test_the_notebook_in_both_themes(written, tmp_path):
    notebook = nbformat.read(TOUR, 4)
    (tmp_path / "docs").symlink_to(TOUR.parents[1] / "docs")
    (tmp_path / "examples").mkdir()
    for theme in SCHEMES:
        look_at(written(f"examples/{theme}.html", page_of(notebook, theme)), schemes=[theme], ignored=NOT_OURS)
