"""The pictures: text grids as in the docstrings, SVG, Chrome trace, and the numbers beneath them."""

import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from raypar.schedules import CATALOG, Costs, Event, Schedule, Timeline, build, chrome_trace, lower, simulate, svg, text
from raypar.schedules.action import COMPUTE, RECVS, STEP, Action, Op
from raypar.schedules.drawing.cells import excerpt
from raypar.schedules.schedule import MOST_DRAWN

SVG = "{http://www.w3.org/2000/svg}"
DRAWN = {"naive": (4, 2), "interleaved": (2, 4), "zb-h1": (4, 6), "zb-h2": (3, 6), "zb-v": (2, 4)} | {
    "zb-interleaved": (2, 2),
    "looped-bfs": (2, 3),
    "dualpipe-v": (2, 4),
    "dualpipe": (1, 4),
    "v-half": (3, 2),
    "v-min": (3, 2),
    "pipedream": (3, 1, None, 7),
    "pipedream-vertical": (3, 1, None, 7),
    "pipedream-2bw": (2, 2, None, 4),
}


@pytest.mark.parametrize("name", CATALOG)
def test_the_docstring_of_a_generator_shows_what_is_drawn(name):
    docstring = inspect.getdoc(CATALOG[name].generate)
    shown = docstring.split("::\n\n")[1]
    assert inspect.cleandoc(shown) == text(build(name, *DRAWN.get(name, (4, 8))))


def test_lowering_does_not_change_the_picture():
    schedule = build("1f1b", 3, 5)
    assert text(lower(schedule)) == text(schedule)


def test_the_figures_of_a_schedule_are_in_slots():
    """A timeline has durations of its own, a schedule none: its 20 % is nobody's prediction."""
    schedule = build("1f1b", 2, 4)
    assert text(schedule).splitlines()[-1] == "1f1b in slots: makespan 10, bubble 20.0%, in flight 2 1"
    assert "1f1b (F 1, B 2): makespan 15, bubble 20.0%" in svg(schedule), "a picture has backwards of their real width"
    assert "in slots" not in text(simulate(schedule))


def test_a_timeline_is_drawn_to_scale():
    assert text(simulate(build("1f1b", 2, 2), Costs(b=2))).splitlines() == [
        "rank 0  F0 F1       B0 --    B1 --",
        "rank 1     F0 B0 -- F1 B1 --",
        "1f1b: makespan 9, bubble 33.3%, in flight 2 1",
    ]


def test_a_kind_of_action_that_takes_nothing_is_no_slot():
    costs = Costs(f=1.0, i=2.0, w=0.001)
    schedule = Schedule.of("halves", ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"])
    lines = text(simulate(schedule, costs)).splitlines()
    assert max(map(len, lines)) < 60
    for row, line in zip(schedule.rows, lines, strict=False):
        assert {f"{action.op}{action.microbatch}" for action in row if action.op is not Op.W} <= set(line.split())


def test_colours_are_escapes_around_the_same_text():
    schedule = build("1f1b", 2, 3)
    painted = text(schedule, color=True)
    assert painted.count("\x1b[38;5;16;48;5;69m") == painted.count("\x1b[38;5;16;48;5;150m") == 6
    assert re.sub(r"\x1b\[[\d;]+m", "", painted) == text(schedule)


@pytest.mark.long
def test_a_wide_schedule_is_cut_and_says_so():
    schedule = build("gpipe", 100, 300)
    lines = text(schedule).splitlines()
    assert max(map(len, lines)) <= 160
    assert len(lines) == 64 + 2
    assert lines[-2].startswith("(left out: ranks 64 to 99 of 100 and slots")
    assert lines[-2].endswith('to 797 of 798; .save("FILE.svg") draws all)')
    narrow = text(build("1f1b", 2, 8), width=30).splitlines()
    assert max(map(len, narrow[:2])) <= 30
    whole = text(build("1f1b", 2, 200), width=None).splitlines()
    assert len(whole) == 3
    assert whole[0].rstrip().endswith("B199")


def test_a_timeline_measures_compute_against_the_whole():
    schedule = build("1f1b", 2, 1)
    f0, b0, f1, b1 = (Action(0, Op.F, 0), Action(0, Op.B, 0), Action(1, Op.F, 0), Action(1, Op.B, 0))
    measured = Timeline(
        schedule,
        (
            Event(0, "pp=0 dp=0", f0, 100.0, 101.0),
            Event(1, "pp=1 dp=0", f1, 101.5, 102.5, bytes=64),
            Event(1, "pp=1 dp=0", b1, 102.5, 104.5),
            Event(0, "pp=0 dp=0", b0, 105.0, 107.0),
            Event(0, "pp=0 dp=0", STEP, 107.0, 108.0),
        ),
    )
    assert (measured.start, measured.end, measured.makespan) == (100, 108, 8)
    assert (measured.busy(0), measured.busy(1), measured.busy()) == (3, 3, 6)
    assert measured.bubble == 1 - 6 / 16
    assert measured.in_flight == (1, 1)
    assert (measured.name, measured.num_ranks) == ("1f1b", 2)
    ElementTree.fromstring(svg(measured))
    assert text(measured).count("F0") == 2
    assert text(measured).splitlines()[-1].startswith("1f1b: makespan 8, bubble"), "in whatever unit that is"
    clocked = replace(measured, measured=True)
    assert text(clocked).splitlines()[-1].startswith("1f1b: makespan 8,000 ms, bubble")
    assert "8,000 ms" in svg(clocked)


def test_a_pause_much_longer_than_a_slot_is_drawn_at_once():
    row = (Action(0, Op.F, 0), Action(0, Op.B, 0))
    events = (Event(0, "pp=0", row[0], 0.0, 1e-6), Event(0, "pp=0", row[1], 1e-6, 1e6))
    lines = text(Timeline(Schedule.of("stalled", [row]), events)).splitlines()
    assert lines[0].startswith("rank 0  F0 B0 -- --")
    assert lines[1].endswith('to 999999999999 of 1000000000000; .save("FILE.svg") draws all)')


def test_a_backward_in_halves_holds_its_activation_until_the_weights_are_done():
    row = [Action(0, op, mb) for op, mb in [(Op.F, 0), (Op.I, 0), (Op.F, 1), (Op.W, 0), (Op.I, 1), (Op.W, 1)]]
    assert simulate(Schedule.of("halves", [row])).in_flight == (2,)


def test_an_empty_timeline_has_no_length():
    empty = Timeline(build("gpipe", 2, 1), ())
    assert (empty.makespan, empty.bubble, empty.in_flight) == (0, 0, (0, 0))
    assert "makespan 0" in text(empty)
    ElementTree.fromstring(svg(empty))
    assert chrome_trace(empty)["traceEvents"] == []


def test_the_svg_has_a_lane_a_rank_and_a_box_an_action():
    schedule = build("interleaved", 2, 4)
    root = ElementTree.fromstring(svg(schedule))
    assert root.tag == f"{SVG}svg"
    boxes = root.findall(f"{SVG}g")
    assert len(boxes) == schedule.num_actions
    assert len(root.findall(f"{SVG}rect[@class='raypar-lane']")) == 2
    assert "bubble 11.1%" in root.find(f"{SVG}title").text
    by_tip = {box.find(f"{SVG}title").text.split()[0]: box for box in boxes}
    assert by_tip["2F1"].find(f"{SVG}text").text == "1"
    fills = {tip: box.find(f"{SVG}rect").get("fill") for tip, box in by_tip.items()}
    assert fills["0F0"] == fills["0F3"] == fills["1F0"]
    assert len({fills["0F0"], fills["2F0"], fills["0B0"], fills["2B0"]}) == 4


def test_boxes_of_the_svg_lie_inside_it_and_do_not_overlap():
    timeline = simulate(lower(build("1f1b", 3, 6)), Costs(link=0.3, step=1.0))
    root = ElementTree.fromstring(svg(timeline))
    lanes = {}
    for box in root.findall(f"{SVG}g"):
        rect, rank = box.find(f"{SVG}rect"), re.search(r"on pp=(\d+)", box.find(f"{SVG}title").text)[1]
        x, width = float(rect.get("x")), float(rect.get("width"))
        lanes.setdefault(rank, []).append((x, x + width))
    assert len(lanes) == 3
    for boxes in lanes.values():
        boxes.sort()
        assert boxes[0][0] >= 64
        assert boxes[-1][1] <= float(root.get("viewBox").split()[2])
        assert all(left[1] <= right[0] for left, right in pairwise(boxes))


def test_names_are_escaped_and_notebooks_get_a_picture_of_what_can_be_looked_at():
    schedule = Schedule.of('<&"', [[Action(0, Op.F, 0)]])
    assert '<&"' in ElementTree.fromstring(schedule._repr_svg_()).find(f"{SVG}title").text
    assert build("gpipe", 1, MOST_DRAWN)._repr_svg_() is None


@pytest.mark.parametrize("lowered", [False, True])
def test_a_trace_has_every_action_and_an_arrow_for_every_value_that_travels(lowered):
    schedule = build("interleaved", 2, 4)
    schedule = lower(schedule) if lowered else schedule
    timeline = simulate(schedule, Costs(link=0.25))
    trace = json.loads(json.dumps(chrome_trace(timeline)))
    events = trace["traceEvents"]
    slices = {(event["pid"], event["name"]): event for event in events if event["ph"] == "X"}
    assert sorted(slices) == sorted((event.rank, str(event.action)) for event in timeline.events)
    assert (slices[0, "0F1"]["ts"], slices[0, "0F1"]["dur"]) == (1e6, 1e6)
    assert {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"} == {0, 1}
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    # 3 boundaries, forwards and backwards, 4 microbatches.
    assert starts.keys() == ends.keys() == set(range(3 * 2 * 4))
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert start["pid"] != end["pid"]
        for arrow in (start, end):
            inside = [
                s
                for (pid, _), s in slices.items()
                if pid == arrow["pid"] and s["ts"] <= arrow["ts"] <= s["ts"] + s["dur"]
            ]
            assert inside


def test_a_trace_of_a_step_that_failed_lacks_only_what_did_not_happen():
    whole = simulate(lower(build("1f1b", 2, 2)))
    part = Timeline(whole.schedule, whole.events[: len(whole.events) // 2])
    events = chrome_trace(part)["traceEvents"]
    received = [event for event in part.events if event.action.op in RECVS]
    assert sum(event["ph"] == "s" for event in events) == sum(event["ph"] == "f" for event in events) == len(received)


def test_an_excerpt_is_a_window_around_its_centre():
    shown = excerpt(build("1f1b", 20, 20), (10, 15), {(10, 15)}, ranks=3, actions=4)
    assert shown.splitlines() == [
        "rank 9: ..    9B1     9F12    9B2     9F13    ..",
        "rank 10: ..   10F11   10B2   >10F12<  10B3    ..",
        "rank 11: ..   11B2    11F11   11B3    11F12   ..",
        "(ranks 9 to 11 of 20, actions 13 to 16)",
    ]


def test_importing_the_schedules_imports_neither_torch_nor_ray():
    code = "import sys, raypar.schedules; sys.exit(bool({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_drawn_ops_are_the_compute_ops():
    halves = Schedule.of("halves", [[Action(0, Op.F, 0), Action(0, Op.I, 0), Action(0, Op.W, 0)]])
    assert text(halves, color=True).count("\x1b[0m") == len(COMPUTE) - 1


def test_the_picture_in_the_readme_is_what_is_drawn():
    drawn = Path(__file__).parents[3] / "docs/1f1b.svg"
    assert drawn.read_text() == svg(build("1f1b", 4, 8)) + "\n"


def test_a_step_under_way_has_a_cursor_and_what_is_to_come_is_pale():
    schedule = build("gpipe", 2, 2)
    done, cursor = {Action.parse("0F0"), Action.parse("0F1")}, Action.parse("1F0")
    assert text(schedule, done=done, cursor=cursor).splitlines()[:2] == [
        "rank 0   F0  F1          b0  b1",
        "rank 1      >f0  f1  b0  b1",
    ]
    drawn = svg(schedule, done=done, cursor=cursor)
    assert drawn.count('fill-opacity="0.3"') == 6 + 1  # and the one that explains it
    assert "pale: to come" in drawn
    assert drawn.count("stroke-width") == 1
    assert svg(schedule).count('fill-opacity="0.3"') == 0


def test_actions_too_short_for_a_slot_are_counted():
    schedule = build("gpipe", 1, 2)
    of = {"rank": 0, "actor": "pp=0"}
    names = [action for action in schedule.rows[0] if action.op in COMPUTE]
    ends = [0.0, 1.0, 1.001, 2.0, 3.0]  # the second lasts a thousandth of a slot, and its slot is the third's
    events = tuple(Event(**of, action=a, start=s, end=e) for a, s, e in zip(names, ends, ends[1:], strict=False))
    assert "(1 action is too short to be drawn)" in text(Timeline(schedule, events, measured=True)).splitlines()
    assert "too short" not in text(schedule)


def test_a_timeline_of_a_step_by_hand_says_that_nothing_was_measured():
    empty = Timeline(build("gpipe", 2, 2), (), measured=True)
    for drawn in (repr(empty), empty._repr_svg_()):
        assert "gpipe: nothing was measured (a step by hand is not)" in drawn
