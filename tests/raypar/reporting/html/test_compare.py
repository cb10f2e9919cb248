"""``raypar report A B`` compares runs; whatever is poor in one of them, the rest is shown."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import GPT
from raypar.actors.specs.run import Run
from raypar.cli.main import run_command
from raypar.config.toml import plain_of, toml_of
from raypar.reporting.html.compare import comparison
from raypar.reporting.html.markup import script
from raypar.reporting.run_folder.read import read
from tests.raypar.reporting.html.test_report import EVIL, Reader, report

RUN = Run(steps=4)


def written(folder: Path, run: Run = RUN, **changes) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(toml_of(plain_of(run)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(report(step, **changes)) + "\n" for step in range(4)))
    return folder


def settings(texts):
    """What stands below the title of the settings that differ."""
    start = texts.index("Settings that differ")
    return texts[start + 1 : texts.index("Figures")]


def test_the_settings_that_differ_come_first_and_the_curves_are_over_each_other(tmp_path, capsys):
    one, other = written(tmp_path / "one"), written(tmp_path / "other", replace(RUN, mesh=Mesh(dp=2), seed=7), loss=3.0)
    assert run_command(["report", str(one), str(other)]) == 0
    assert capsys.readouterr().out == f"written: {one / 'comparison.html'}\n"
    read = Reader((one / "comparison.html").read_text())
    assert settings(read.texts) == ["setting", "one", "other", "seed", "0", "7", "mesh.dp", "1", "2"]
    assert any(text.startswith("step 4: one ") and ", other 3" in text for text in read.tips)
    classes = {value for name, value in read.attributes if name == "class"}
    assert {"line one dashes-0", "line two dashes-1"} <= classes, "equal curves stay visible"
    assert read.scripts == [str(script())] and not {"link", "img"} & set(read.tags)


def test_runs_of_the_same_settings_and_the_same_name_are_told_apart(tmp_path):
    pasts = [read(written(tmp_path / "x/run")), read(written(tmp_path / "y/run"))]
    texts = Reader(comparison(pasts)).texts
    assert "None: all settings are the same." in texts
    assert {str(tmp_path / "x/run"), str(tmp_path / "y/run")} <= set(texts)


def test_different_models_are_told(tmp_path):
    pasts = [read(written(tmp_path / "a")), read(written(tmp_path / "b", replace(RUN, model=GPT(layers=2))))]
    texts = Reader(comparison(pasts)).texts
    assert "They have different models: a lower loss need not be a better run." in texts
    assert {"GPT of 8 layers, 256 hidden on one actor", "GPT of 2 layers, 256 hidden on one actor"} <= set(texts)


@pytest.mark.parametrize("name", ["run.toml", "metrics.jsonl", "timeline.json", "schedule.csv", "provenance.json"])
def test_of_a_damaged_folder_the_rest_is_shown(name, tmp_path):
    good, bad = written(tmp_path / "good"), written(tmp_path / "bad")
    (bad / name).write_text("[[[\n")
    assert run_command(["report", str(good), str(bad), "-o", str(tmp_path / "c.html")]) == 0
    texts = Reader((tmp_path / "c.html").read_text()).texts
    assert "Could not be read" in texts
    assert any(text.startswith(f"{bad}: {name} ") for text in texts)
    assert {"good", "bad", "Train loss, smoothed"} <= set(texts)


def test_a_report_with_a_folder_of_no_run_is_refused_and_writes_nothing(tmp_path, capsys):
    good, other = written(tmp_path / "good"), written(tmp_path / "other")
    (good / "report.html").write_text("of before")
    gone = f"'{tmp_path / 'gone'}' is no run folder: there is nothing; give one that raypar train has written"
    assert run_command(["report", str(tmp_path / "gone"), str(good / "run.toml"), str(good)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == (
        "",
        ["raypar: 2 mistakes:", f"- {gone}", f"- '{good / 'run.toml'}' is no run folder, but a file: give '{good}'"],
    )
    assert run_command(["report", str(good), str(tmp_path / "gone"), str(other)]) == 2
    assert capsys.readouterr() == ("", f"raypar: {gone}\n")
    assert run_command(["report", str(tmp_path / "gone"), str(tmp_path / "lost")]) == 2
    assert (good / "report.html").read_text() == "of before"
    assert not (good / "comparison.html").exists()


def test_of_damaged_metrics_the_sound_steps_are_shown(tmp_path, capsys):
    good, bad = written(tmp_path / "good"), written(tmp_path / "bad")
    lines = (bad / "metrics.jsonl").read_text().splitlines(keepends=True)
    (bad / "metrics.jsonl").write_text("".join([lines[0], "{broken\n", *lines[2:]]))
    assert run_command(["report", str(good), str(bad)]) == 0
    assert f"could not be read: {bad}: metrics.jsonl line 2 has a text" in capsys.readouterr().out
    texts = Reader((good / "comparison.html").read_text()).texts
    at = texts.index("steps", texts.index("Figures"))
    assert texts[at : at + 3] == ["steps", "4 of 4", "3 of 4"]


def test_when_a_run_was_resumed_is_told_and_not_how_python_spells_it(tmp_path):
    one, other = written(tmp_path / "one"), written(tmp_path / "other")
    again = [
        {"host": "x", "started": "2026-11-25T02:01:06+00:00"},
        {"host": "x", "started": "2026-11-25T03:00:00+00:00"},
    ]
    (one / "provenance.json").write_text(json.dumps({"host": "x"}))
    (other / "provenance.json").write_text(json.dumps({"host": "x", "resumed": again}))
    rows = settings(Reader(comparison([read(one), read(other)])).texts)
    assert rows[3:] == [
        *("(started, resumed 1)", "\u2013", "2026-11-25T02:01:06+00:00"),
        *("(started, resumed 2)", "\u2013", "2026-11-25T03:00:00+00:00"),
    ]


def test_skipped_steps_are_compared(tmp_path):
    one, other = written(tmp_path / "one"), written(tmp_path / "other", skipped=True)
    texts = Reader(comparison([read(one), read(other)])).texts
    at = texts.index("skipped steps")
    assert texts[at : at + 3] == ["skipped steps", "0", "4"]
    assert "skipped steps" not in Reader(comparison([read(one)])).texts


def test_whatever_runs_are_called_is_inert(tmp_path):
    config = plain_of(RUN)
    config["data"]["path"] = EVIL
    first = read(written(tmp_path / "a"))
    evil = replace(first, folder=Path("/runs/<script>x"), config=config | {EVIL: EVIL}, provenance={EVIL: EVIL})
    shown = comparison([first, evil], faults=[EVIL])
    assert Reader(shown).scripts == [str(script())]
    assert shown.count("&lt;script&gt;") >= 8


def test_more_runs_than_colours_have_a_page(tmp_path):
    first = read(written(tmp_path / "a"))
    Reader(comparison([replace(first, folder=Path(f"/runs/{number}")) for number in range(9)]))


def test_a_folder_of_an_older_raypar_is_reported(tmp_path):
    """Its ledger has no seconds, its lines no later figures, and its settings are not all those of today."""
    old = written(tmp_path / "old")
    toml = (old / "run.toml").read_text()
    (old / "run.toml").write_text(toml.replace('backward = "auto"\n', "").replace("[model]\n", "[model]\ngone = 1\n"))
    (old / "ledger.json").write_text('{"pp=0": {"pp send": [24, 196608]}}')
    (old / "log.txt").write_text("2026-11-24T09:54:26+0000 INFO starting 4 actors\n")
    assert run_command(["report", str(old)]) == 0
    shutil.copytree(old, tmp_path / "copy")
    assert run_command(["report", str(old), str(tmp_path / "copy")]) == 0
