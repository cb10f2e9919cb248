"""What a notebook shows: tables that never run off the page, with every name escaped; a REPL shows text."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import raypar as rp
from raypar.actors.collective.ledger import LedgerEntry
from raypar.errors import Death
from raypar.job.stepping.views import StepDrawing, Taken
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.report import Report
from raypar.reporting.report_table import Reports
from raypar.reporting.tables.memory_table import MemoryTable
from raypar.reporting.tables.totals import Totals
from raypar.schedules.catalog import build
from raypar.schedules.drawing.notebook import box, in_notebook, notebook_table
from raypar.schedules.drawing.overlay import Overlay
from raypar.schedules.schedule import ScheduleError
from raypar.schedules.simulation.simulate import simulate
from raypar.schedules.step_board import MoveError

REPORT = Report(3, 2.5, 1.25, 1e-3, 512, 1000.0, 512.0, 0.25, None, (2, 1), (1 << 20, 2 << 20))


def test_nothing_runs_off_the_page():
    totals = Totals({"pp=0": {("pp", "send"): LedgerEntry(3, 1024, 0.5)}})
    for shown in (REPORT, Evaluation(4, 2.0, 64, 0.5), totals):
        html = shown._repr_html_()
        assert html.startswith('<div style="max-width: 100%; overflow-x: auto"><table class="raypar-table">')
        assert re.search("</table><style>[^<]*</style></div>$", html)
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


def test_a_run_shows_what_is_not_its_default():
    run = rp.Run(model=rp.GPT(layers=2), mesh=rp.Mesh(pp=2), steps=7, optim=rp.SGD(lr=0.5))
    assert repr(rp.Run()).startswith("Run(model=GPT(layers=8, ")
    assert repr(rp.Run()).endswith(", mesh=Mesh(), schedule='1f1b', steps=100)")
    assert repr(run).endswith(", mesh=Mesh(pp=2), schedule='1f1b', optim=SGD(lr=0.5), steps=7)")
    html = replace(run, folder="<i>")._repr_html_()
    assert ">Mesh(pp=2)</td>" in html and "&lt;i&gt;" in html and "All else has its default." in html
    assert "schedule=<Schedule 1f1b: 2 ranks" in repr(replace(run, schedule=build("1f1b", 2, 2)))
    own = rp.Run(model=rp.Layers(list, loss=len), data=rp.Batches(max))
    assert repr(own) == (
        "Run(model=Layers(fn=list, loss=len, vocab=256), mesh=Mesh(), schedule='1f1b', data=Batches(fn=max), steps=100)"
    )


def test_reports_are_a_list_and_a_table():
    reports = Reports(replace(REPORT, step=step) for step in range(30))
    assert reports == [replace(REPORT, step=step) for step in range(30)]
    assert reports[3] == replace(REPORT, step=3)
    lines = repr(reports).splitlines()
    assert len(lines) == 1 + 21 and lines[11].startswith("...")
    assert lines[1].split() == ["1", "2.5000", "1.25", "0.001", "1,000", "512.0", "ms", "25.0%", "2", "MiB"]
    assert repr(reports[:2]).count("\n") == 2, "a part is a table too"
    assert reports[-2:]._repr_html_().count("<tr>") == 3
    assert repr(Reports()) == "[]"
    by_hand = repr(Reports([replace(REPORT, by_hand=True)])).splitlines()[1]
    assert by_hand.split()[4:7] == ["-", "-", "-"]
    assert len(repr(REPORT)) < 140 and "by hand" in repr(replace(REPORT, by_hand=True))


def test_a_step_by_hand_is_drawn_above_its_figures():
    drawn = StepDrawing("step 1, <i>", build("gpipe", 2, 2), frozenset(), None)
    html = replace(REPORT, by_hand=True, picture=drawn.html)._repr_html_()
    assert html.index("&lt;i&gt;") < html.index("<svg") < html.index(">loss<")
    assert replace(REPORT, picture=drawn.html) == REPORT
    assert replace(REPORT, picture=drawn.html).to_dict() == REPORT.to_dict()
    taken = Taken.of((), drawn)
    assert taken._repr_html_() == drawn.html() and repr(taken) == str(drawn)
    assert repr(taken).startswith("step 1, <i>\nrank 0")


def test_pictures_are_within_the_page_so_that_they_have_its_colours():
    schedule = build("gpipe", 2, 2)
    assert schedule._repr_html_() == schedule._repr_svg_()
    timeline = simulate(schedule)
    assert timeline._repr_html_() == timeline._repr_svg_()
    assert Overlay(timeline, timeline)._repr_html_().startswith("<svg ")


@pytest.mark.parametrize(
    "error",
    [
        rp.ConfigError(["a", "b"]),
        rp.JobError("no"),
        rp.ActorDiedError("pp=1 died", Death("killed")),
        rp.CheckpointError(["no"]),
        rp.NonFiniteError("inf"),
        ScheduleError("no"),
        MoveError("not ready"),
    ],
)
def test_an_error_is_its_own_lines(error):
    cell = compile("def f():\n    raise error\nf()", "a cell", "exec")
    with pytest.raises(type(error)) as raised:
        exec(cell, {"__name__": "__main__", "error": error})
    first, *rest = raised.value._render_traceback_()
    assert first == f"\x1b[1m{type(error).__name__}\x1b[0m:" + ("\n" if ("- a") in str(error) else " ") + str(error)
    assert rest == [*getattr(error, "__notes__", []), "  in line 3: ", "  in line 2: "]


def test_outside_of_a_notebook_nothing_is_one(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not in_notebook()
