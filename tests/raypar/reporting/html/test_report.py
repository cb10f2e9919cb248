"""The report of a run folder, and its trace: what they show of whole folders and of poor ones."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import Markup

from raypar.actors.specs.run import Run
from raypar.checkpoint.find import Listed
from raypar.cli.main import run_command
from raypar.config.recipes import recipe
from raypar.config.toml import plain_of, toml_of
from raypar.planner.prediction import from_steps
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.html.charts import ChartLine, line_chart, stacked
from raypar.reporting.html.figures import History, significant
from raypar.reporting.html.markup import concatenated, element, script
from raypar.reporting.html.page import page
from raypar.reporting.report import Report
from raypar.reporting.run_folder.read import OpCounts, Past
from raypar.schedules import Costs, build, lower, simulate, to_csv
from raypar.schedules.drawing.overlay import Overlay
from raypar.schedules.formatting import duration, percentage, size

SCHEDULE = lower(build("1f1b", 2, 4))
EVIL = '<script>alert("1")</script>'
VOID = {"meta"}


class Reader(HTMLParser):
    """Elements must be closed in their order; collects tags, texts, scripts and attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.scripts, self.attributes = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open[-1:] == ["script"] else self.texts).append(data)

    @property
    def tips(self):
        """What the page's script shows at the pointer: of each chart and step the figures, and of bars the parts."""
        found = [value for name, value in self.attributes if name == "data-tip"]
        for lines in (json.loads(value) for name, value in self.attributes if name == "data-lines"):
            for step in sorted({step for line in lines for step in line["steps"]}):
                at = [(line, line["steps"].index(step)) for line in lines if step in line["steps"]]
                found.append(f"step {step:,.0f}: " + ", ".join(f"{line['name']} {line['texts'][n]}" for line, n in at))
        return found


def report(step, **changes):
    return replace(
        Report(step, 5.0 / (step + 1), 1.0, 1e-3, 4096, 2000.0, 1600.0, 0.125, None, (2, 1), (3 << 20, 2 << 20)),
        **changes,
    ).to_dict()


def past(**changes):
    metrics = [*(report(step) for step in range(4)), Evaluation(4, 1.5, 100, 0.5).to_dict()]
    return replace(
        Past(
            folder=Path("/runs/first"),
            config=plain_of(Run(steps=4, microbatches=8)),
            metrics=metrics,
            schedule=SCHEDULE,
            step=3,
            timelines=[simulate(SCHEDULE, Costs(f=0.05, b=0.1))],
            ledger={"pp=0": {"pp send": OpCounts(1234, 3 << 20, 2.5)}, "pp=1": {"pp send": OpCounts(1, 0, 1.0)}},
            checkpoints=[Listed(Path("/runs/first/checkpoints/step-00000004"), 4, 74 << 20, 99, 66, [])],
        ),
        **changes,
    )


def nothing(**changes):
    return past(metrics=[], schedule=None, step=None, timelines=[], ledger={}, checkpoints=[], **changes)


def test_the_page_shows_all_of_a_run():
    read = Reader(page(past()))
    reported = set(read.texts)
    assert {"4 of 4", "1.2500", "1.5000", "2,000", "12.5%", "3.0 MiB", "6.4 s"} <= reported
    titles = [
        "Loss", "Learning rate", "Gradient norm before clipping", "Perplexity", "Tokens seen", "Tokens/s", "Bubble",
        "Model FLOP/s of an actor", "Measured over predicted", "Peak memory", "Messages", "Checkpoints", "Provenance",
        "Configuration",
    ]  # fmt: skip
    assert [text for text in read.texts if text in titles][-len(titles) :] == titles
    assert "step 4: train, smoothed 1.654, train, every step 1.25, validation 1.5" in read.tips
    assert "0F0 on pp=0, predicted: 0 ms to 50.0 ms" in reported
    assert {
        "pp send",
        "1,235",
        "1,234",
        "3.5 s",
        "2.5 s",
        "step-00000004",
        "74.0 MiB",
        "99",
        "sound",
        "optim.lr",
    } <= reported
    assert read.tags.count("mark") == 3  # its legend, steps, microbatches
    links = [value.removeprefix("#") for name, value in read.attributes if name == "href"]
    assert links == [value for name, value in read.attributes if name == "id"], "contents"


def test_only_our_script_runs_and_nothing_is_fetched():
    text = page(past())
    read = Reader(text)
    assert read.scripts == [str(script())]
    assert not {"link", "img", "iframe", "object"} & set(read.tags)
    assert not {name for name, _ in read.attributes} & {"src", "srcset"}
    assert all(value.startswith("#") for name, value in read.attributes if name == "href")
    assert not re.findall(r"https?:|fetch|import|eval|innerHTML(?! = this.first|;)", script())
    assert [name for name, _ in read.attributes if name.startswith("on")] == []
    assert "url(" not in text
    assert "@import" not in text


def test_whatever_a_run_is_called_is_inert():
    config = plain_of(Run())
    config["data"]["path"] = config["model"]["dropout"] = EVIL
    config["mesh"]["dp"] = config[EVIL] = EVIL
    evil = replace(SCHEDULE, name=EVIL)
    timeline = simulate(evil)
    events = tuple(event._replace(actor=EVIL) for event in timeline.events)
    listed = Listed(Path(f"/{EVIL}"), 1, 2, 3, 0, [EVIL])
    shown = page(
        past(
            folder=Path(f"/runs/{EVIL}"),
            config=config,
            schedule=evil,
            timelines=[replace(timeline, schedule=evil, events=events)] * 2,
            ledger={EVIL: {EVIL: OpCounts(1, 2)}},
            log=[f"2026-11-24T09:54:26+0000 ERROR {EVIL}"],
            provenance={EVIL: EVIL},
            checkpoints=[listed],
        )
    )
    assert Reader(shown).scripts == [str(script())]
    assert shown.count("&lt;script&gt;") >= 12


def test_a_run_without_figures_says_so():
    reported = Reader(page(nothing())).texts
    assert reported.count("No step was taken yet.") == 2
    assert {"No step was measured.", "None.", "0 of 4"} <= set(reported)


def test_a_run_of_one_step_and_one_that_lost_its_loss_have_a_page():
    one = Reader(page(past(metrics=[report(0)])))
    assert ("class", "dot one") in one.attributes
    lost = [report(0), report(1, loss=math.nan), report(2, loss=math.inf)]
    assert "inf" in Reader(page(past(metrics=lost))).texts
    Reader(page(past(metrics=[report(0, loss=math.nan), Evaluation(1, math.nan, 1, 1.0).to_dict()])))


def test_a_step_that_was_taken_twice_counts_once():
    history = History.of(past(metrics=[report(0), report(1, loss=9.0), report(1, loss=8.0)]))
    assert history.points("loss") == [(1, 5.0), (2, 8.0)]


def test_a_model_of_the_users_own_layers_has_a_title():
    config = plain_of(Run()) | {"model": {"fn": "mine.layers", "loss": "mine.loss"}}
    assert "a model of the user's own layers on one actor" in Reader(page(nothing(config=config))).texts


def test_a_run_that_was_resumed_with_other_ranks_has_a_page():
    other = report(1, peak_memory=(9 << 20, 1, 2, 4 << 20), in_flight=(1, 1, 1, 1))
    assert {"pp=0", "9.0 MiB", "2.0 MiB", "pp=3", "4.0 MiB"} <= set(
        Reader(page(past(metrics=[report(0), other]))).texts
    )


def test_a_step_of_very_many_events_is_drawn_at_once():
    timeline = simulate(SCHEDULE, Costs(f=0.05, b=0.1))
    start = time.process_time()
    page(past(timelines=[replace(timeline, events=timeline.events * 1000)]))
    assert time.process_time() - start < 5, "looking for the first event once an event took minutes"


def test_a_model_is_called_by_its_kind():
    for name, title in (("gpt-tiny", "GPT of 8 layers, 32 hidden"), ("llama-tiny", "Llama of 8 layers, 32 hidden")):
        texts = Reader(page(nothing(config=plain_of(recipe(name))))).texts
        assert any(one.startswith(f"{title} on pp=2") for one in texts)


@pytest.mark.long
def test_the_report_of_a_long_run_stays_small():
    long = page(past(metrics=[report(step, loss=math.sin(step)) for step in range(40_000)]))
    assert len(long) < 300_000


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [0.0, 0.0], [-1.0, 1.0], [1e-12, 1e12], [3.0, math.nan, 4.0]])
def test_a_chart_stays_in_its_frame(values):
    drawn = str(line_chart([ChartLine("a", list(enumerate(values)))], significant, zero=True))
    Reader(drawn)
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', drawn).groups())
    for path in re.findall(r' d="M([^"h]*)"', drawn):
        for place in path.split("L"):
            x, y = map(float, place.split())
            assert 0 <= x <= width
            assert 0 <= y <= height
    assert '"nan' not in drawn


def test_a_gap_breaks_a_line():
    drawn = str(line_chart([ChartLine("a", [(0, 1.0), (1, math.nan), (2, 2.0)])], significant))
    assert drawn.count('class="line') == 2


def test_a_line_keeps_its_highest_point_however_long_it_is():
    points = [(float(step), 0.0) for step in range(10_000)]
    points[4321] = (4321.0, 7.0)
    highest = min(
        float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", str(line_chart([ChartLine("a", points)], significant)))
    )
    assert highest < 30


def test_bars_are_to_scale():
    drawn = str(stacked({"a": {"x": 3.0, "y": 1.0}, "b": {"x": 1.0}, "c": {"y": 0.0}}, {"x": "one", "y": "two"}, size))
    assert re.findall(r"width: ([\d.]+)%", drawn) == ["75.00", "25.00", "25.00"]
    assert Reader(drawn).tips == ["a: x 3 B", "a: y 1 B", "b: x 1 B"]
    assert Reader(drawn).texts == ["a", "4 B", "b", "1 B", "c", "0 B", "x", "y"]
    assert 'class="key"' not in str(stacked({"a": {"x": 0.0}}, {"x": "one"}, size))


def test_text_is_escaped_and_markup_is_not():
    assert element("b", "<", Markup("<i></i>"), class_='"', aria_label=1, id=None) == (
        '<b class="&#34;" aria-label="1">&lt;<i></i></b>'
    )
    assert concatenated("&", Markup("&amp;")) == "&amp;&amp;"


def test_figures_are_written_for_people():
    assert [size(n, tenths=True) for n in (0, 1023, 1024, 3 << 20)] == ["0 B", "1,023 B", "1.0 KiB", "3.0 MiB"]
    assert size(5 << 50, tenths=True) == "5,120.0 TiB"
    assert [duration(s) for s in (0.5, 150, 3725, 3599)] == ["0.5 s", "2 min", "1 h 02 min", "1 h 00 min"]
    assert [percentage(p) for p in (0, 0.05, 0.1234)] == ["0%", "5%", "12.3%"]
    assert [significant(n) for n in (0.00012345, 2.5, 12345)] == ["0.0001234", "2.5", "12,345"]


# --- the commands ---


@pytest.fixture
def folder(tmp_path):
    """A run folder as training leaves it."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text(toml_of(plain_of(Run(steps=4))))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in past().metrics))
    (folder / "schedule.csv").write_text(to_csv(SCHEDULE))
    rows = [[e.rank, e.actor, str(e.action), e.start, e.end, e.bytes, e.bucket] for e in past().timelines[0].events]
    (folder / "timeline.json").write_text(json.dumps({"step": 3, "timelines": [{"actions": rows}]}))
    return folder


def test_report_and_trace_write_into_the_run_s_folder_or_where_they_are_told(folder, tmp_path, capsys):
    assert run_command(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"written: {folder / 'report.html'}\n"
    assert "4 of 4" in Reader((folder / "report.html").read_text()).texts
    assert run_command(["trace", str(folder)]) == 0
    assert capsys.readouterr().out == f"written: {folder / 'trace.json'} (step 4)\n", "counted from 1"
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    before = sorted(path.name for path in folder.iterdir())
    for command, flag in (("report", "-o"), ("trace", "--out")):
        assert run_command([command, str(folder), flag, str(tmp_path / command)]) == 0
        assert (tmp_path / command).stat().st_size > 1000
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_folder_whose_name_is_no_text_has_a_report(folder):
    odd = folder.rename(folder.with_name("run\udcff"))
    assert run_command(["report", str(odd)]) == 0
    assert "raypar run in" in (odd / "report.html").read_text()


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_folder_of_no_run_is_a_mistake(command, tmp_path, capsys):
    assert run_command([command, str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_of_a_damaged_folder_the_rest_is_shown_and_every_fault_is_told(folder, capsys):
    (folder / "ledger.json").write_text("{")
    (folder / "timeline.json").write_text("[]")
    assert run_command(["report", str(folder)]) == 0
    first, *reported = capsys.readouterr().out.splitlines()
    assert first == f"written: {folder / 'report.html'}"
    assert [re.match(rf"could not be read: {folder}: (\S+)", line)[1] for line in reported] == [
        "timeline.json",
        "ledger.json",
    ]
    texts = Reader((folder / "report.html").read_text()).texts
    assert {"Could not be read", "4 of 4"} <= set(texts)
    assert run_command(["trace", str(folder)]) == 2
    assert {"ledger.json", "timeline.json"} <= set(re.findall(r"\w+\.jsonl?", capsys.readouterr().err))


def test_the_predicted_step_is_that_of_the_prediction_with_its_source():
    measured = past().timelines[0]
    prediction = from_steps(measured, [])
    reported = Overlay(measured, prediction.timeline, prediction.source).titles[1]
    assert reported in " ".join(" ".join(Reader(page(past())).texts).split()), "the picture has it, in lines that fit"
    assert f"bubble {prediction.timeline.bubble:.1%}" in reported and reported.endswith(f"({prediction.source})")


def test_files_that_cannot_be_written_are_mistakes(folder, tmp_path, capsys):
    assert run_command(["report", str(folder), "-o", str(tmp_path)]) == 2
    assert run_command(["report", str(folder), "-o", str(tmp_path / "no" / "a.html")]) == 2
    (folder / "timeline.json").unlink()
    assert run_command(["trace", str(folder)]) == 2
    reported = capsys.readouterr().err
    for why in ("is a folder: give a file", "there is no folder", "has no measured step"):
        assert why in reported


@pytest.mark.parametrize("command", ["report", "trace"])
def test_the_commands_have_help_and_need_a_folder(command, capsys):
    assert run_command([command, "--help"]) == 0
    assert "RUN" in capsys.readouterr().out
    assert run_command([command]) == 2
