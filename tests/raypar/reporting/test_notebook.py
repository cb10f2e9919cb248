"""What a notebook shows: tables that never run off the page, with every name escaped; a REPL shows text."""

from __future__ import annotations

from dataclasses import replace

import pytest

import raypar as rp
from raypar.actors.collective.ledger import LedgerEntry
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.report import Report
from raypar.reporting.tables.memory_table import MemoryTable
from raypar.reporting.tables.totals import Totals
from raypar.schedules.notebook import box, notebook_table

REPORT = Report(3, 2.5, 1.25, 1e-3, 512, 1000.0, 512.0, 0.25, None, (2, 1), (1 << 20, 2 << 20))


def test_nothing_runs_off_the_page():
    totals = Totals({"pp=0": {("pp", "send"): LedgerEntry(3, 1024, 0.5)}})
    for shown in (REPORT, Evaluation(4, 2.0, 64, 0.5), totals):
        html = shown._repr_html_()
        assert html.startswith('<div style="max-width: 100%; overflow-x: auto"><table>')
        assert html.endswith("</table></div>")
        assert not repr(shown).startswith("<div")


def test_the_figures_are_there():
    html = REPORT._repr_html_()
    for figure in ("2.5000", "1,000", "512.0 ms", "25.0%", "2 1", "1 MiB, 2 MiB"):
        assert f">{figure}</td>" in html
    assert ">7.389</td>" in Evaluation(4, 2.0, 64, 0.5)._repr_html_()
    totals = Totals({"pp=0": {("pp", "send"): LedgerEntry(3, 1024, 0.5)}})
    assert ">send</td>" in totals._repr_html_() and ">1,024</td>" in totals._repr_html_()
    assert totals == {"pp=0": {("pp", "send"): LedgerEntry(3, 1024)}}


def test_a_step_by_hand_shows_no_times():
    html = replace(REPORT, by_hand=True)._repr_html_()
    assert ">stepped by hand</td>" in html
    assert not any(word in html for word in ("tokens/s", "25.0%", "512.0 ms"))
    assert "bubble" not in repr(replace(REPORT, by_hand=True))
    line = replace(REPORT, by_hand=True).to_dict()
    assert (line["by_hand"], line["step_ms"], line["bubble"], line["tokens_per_s"]) == (True, None, None, None)


def test_memory_is_shown_by_kind_and_samples_a_second_where_they_are_known():
    html = replace(REPORT, samples=4, memory={"weights": (1 << 20, 2 << 20), "gradients": (5000, 9)})._repr_html_()
    assert ">5 KiB, 9 B</td>" in html
    assert ">of which weights</td>" in html
    assert ">samples/s</td>" in html
    assert ">7.8</td>" in html


def test_names_are_escaped():
    assert "&lt;b&gt;" in box(notebook_table([("<b>", 1)], ("<i>", "n")))
    assert "<i>" not in notebook_table([], ("<i>",))


def test_a_ledger_prints_as_a_table():
    totals = Totals({"pp=0": {("pp", "send"): LedgerEntry(3, 1024, 0.5)}})
    assert repr(totals).splitlines() == [
        "actor  axis  op    calls  bytes  seconds",
        "pp=0   pp    send  3      1,024  0.500",
    ]
    assert repr(Totals()) == "actor  axis  op  calls  bytes  seconds"
    with pytest.raises(KeyError, match="no actor is called 'pp=7': there are pp=0"):
        totals["pp=7"]


def test_a_name_that_raypar_does_not_have_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match=r"rp\.chaos has no 'kil': it has 'kill'"):
        rp.chaos.kil  # noqa: B018
    with pytest.raises(KeyError, match="no actor is called 'pp=7': there are pp=0"):
        MemoryTable({"pp=0": {}})["pp=7"]
    with pytest.raises(rp.ConfigError, match=r"chaos is 'kill': it must be a list"):
        rp.launch(rp.recipe("gpt-tiny"), chaos="kill")
    with pytest.raises(AttributeError, match="'raypar' has no attribute 'recipees': it has 'recipe'"):
        rp.recipees  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute '__nothing__'$"):
        rp.__nothing__  # noqa: B018
