"""Two timelines on one axis, as a picture, a grid and a trace; and writing drawings to files."""

import json
from xml.etree import ElementTree

import pytest

from raypar.schedules import Costs, Overlay, Schedule, ScheduleError, Timeline, build, lower, simulate
from raypar.schedules.action import Action, Op
from raypar.schedules.formatting import milliseconds
from raypar.schedules.schedule import MOST_DRAWN

SVG = "{http://www.w3.org/2000/svg}"
SCHEDULE = lower(build("1f1b", 2, 2))


def overlay(schedule=SCHEDULE, late=100.0):
    measured = simulate(schedule, Costs(f=0.05, b=0.15))
    moved = [event._replace(start=event.start + late, end=event.end + late) for event in measured.events]
    return Overlay(Timeline(schedule, tuple(moved)), simulate(schedule, Costs(f=0.05, b=0.1)))


def test_the_grid_has_two_lines_a_rank_both_titles_and_why_they_differ():
    assert repr(overlay()).splitlines() == [
        "rank 0 measured   F0 F1          B0 -- --    B1 -- --",
        "rank 0 predicted  F0 F1       B0 --    B1 --",
        "rank 1 measured      F0 B0 -- -- F1 B1 -- --",
        "rank 1 predicted     F0 B0 -- F1 B1 --",
        "measured 1f1b: makespan 600 ms, bubble 33.3%, in flight 2 1",
        "predicted 1f1b: makespan 450 ms, bubble 33.3%, in flight 2 1",
        "the predicted makespan is off by -25%: waits that the schedule does not ask for, and actions that were not as "
        "long as predicted",
    ]


def test_the_picture_has_a_pale_lane_below_each_lane_on_one_axis():
    root = ElementTree.fromstring(overlay().svg())
    lanes = root.findall(f"{SVG}rect[@class='raypar-lane']")
    assert [float(lane.get("y")) for lane in lanes] == sorted({float(lane.get("y")) for lane in lanes})
    assert len(lanes) == 4
    tips = {box.find(f"{SVG}title").text: box.find(f"{SVG}rect") for box in root.findall(f"{SVG}g")}
    first, pale = tips["0F0 on pp=0, measured: 0 ms to 50.0 ms"], tips["0F0 on pp=0, predicted: 0 ms to 50.0 ms"]
    assert (first.get("x"), first.get("width"), first.get("fill")) == tuple(map(pale.get, ("x", "width", "fill")))
    assert float(pale.get("y")) > float(first.get("y"))
    assert first.get("fill-opacity") is None
    assert float(pale.get("fill-opacity")) < 0.5
    words = [text.text for text in root.findall(f"{SVG}text")]
    assert " ".join(words).startswith(" ".join(overlay().titles)), "long ones in several lines"
    assert {"0 ms", "200 ms", "400 ms", "rank 1", "predicted"} <= set(words)


def test_names_in_an_overlay_are_escaped():
    evil = Schedule.of('<script>"&', [[Action(0, Op.F, 0)]])
    timeline = simulate(evil, Costs())
    drawn = Overlay(timeline, timeline)._repr_svg_()
    assert "<script>" not in drawn
    assert '<script>"&' in ElementTree.fromstring(drawn).find(f"{SVG}title").text


def test_timelines_of_two_schedules_are_no_overlay():
    with pytest.raises(ScheduleError, match="shows one schedule"):
        Overlay(simulate(SCHEDULE), simulate(build("gpipe", 2, 2)))


def test_a_step_that_was_not_taken_can_be_laid_over_its_prediction():
    nothing = Overlay(Timeline(SCHEDULE, ()), simulate(SCHEDULE))
    assert "measured 1f1b: makespan 0 ms" in repr(nothing)
    ElementTree.fromstring(nothing.svg())


def test_one_that_is_too_large_to_look_at_says_what_it_is():
    events = simulate(SCHEDULE).events * (MOST_DRAWN // 10)
    assert repr(Overlay(Timeline(SCHEDULE, events), simulate(SCHEDULE))).startswith("<Overlay of <Schedule 1f1b")


def test_an_overlay_is_saved_as_picture_grid_and_trace(tmp_path):
    drawn = overlay()
    assert drawn.save(tmp_path / "a.svg").read_text() == drawn.svg() + "\n"
    assert drawn.save(str(tmp_path / "a.txt")).read_text() == repr(drawn) + "\n"
    events = json.loads(drawn.save(tmp_path / "a.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [names[pid] for pid in sorted(names)] == [
        "pp=0 measured",
        "pp=0 predicted",
        "pp=1 measured",
        "pp=1 predicted",
    ]
    assert {event["ts"] for event in events if event["name"] == "0F0" and event["ph"] == "X"} == {0}


def test_schedules_and_timelines_are_saved_the_same_way(tmp_path):
    schedule, timeline = build("1f1b", 2, 2), simulate(SCHEDULE)
    for drawn, kinds in ((schedule, {"svg", "txt", "csv", "json"}), (timeline, {"svg", "txt", "json"})):
        for kind in kinds:
            assert drawn.save(tmp_path / f"{drawn.name}.{kind}").stat().st_size > 30
        assert {path.suffix[1:] for path in tmp_path.iterdir()} == kinds
        for path in tmp_path.iterdir():
            path.unlink()


@pytest.mark.parametrize("drawn", [build("1f1b", 2, 2), simulate(SCHEDULE), overlay()])
def test_another_ending_is_refused_with_those_there_are(drawn, tmp_path):
    with pytest.raises(ScheduleError, match=r"a\.png' says no kind of drawing: end it in \.svg, \.txt.* or \.json"):
        drawn.save(tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_leaves_nothing_and_the_old_one_stays(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="no such folder"):
        overlay().save(tmp_path / "no" / "a.svg")
    old = tmp_path / "a.txt"
    old.write_text("old")
    monkeypatch.setattr("os.fsync", lambda number: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        overlay().save(old)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0 ms"), (1.5424, "1,542 ms"), (0.0121, "12.1 ms"), (2.5e-5, "0.025 ms")]
)
def test_times_are_said_in_milliseconds(seconds, said):
    assert milliseconds(seconds) == said
