"""Pictures of schedules of real sizes: all actions, numbers that are legible, ranges, and files that can be sent."""

import re
from collections import Counter, defaultdict
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from raypar.schedules import Costs, Schedule, Timeline, build, lower, simulate, svg, text
from raypar.schedules.action import COMPUTE, Action, Op
from raypar.schedules.drawing.boxes import boxes_of
from raypar.schedules.timeline import Event

SVG = "{http://www.w3.org/2000/svg}"
PIXELS = 1440  # of a picture that fills a window
NAME = re.compile(r"(\d*)([A-Z_]+)([\d\- ]*)(?: \(| on )")
SIZES = [
    pytest.param(name, *size, marks=[pytest.mark.long] if size[0] > 16 and name != "1f1b" else [])
    for name in ("1f1b", "interleaved", "zb-v", "dualpipe-v")
    for size in ((16, 64), (64, 256))
]


def actions_in(root):
    """How often each compute op is in a box of the picture, alone or in a range."""
    found = Counter()
    for box in root.findall(f"{SVG}g"):
        _, op, numbers = NAME.match(box.find(f"{SVG}title").text).groups()
        for part in numbers.split():
            first, _, last = part.partition("-")
            found[op] += int(last or first) - int(first) + 1
    return found


@pytest.mark.parametrize(("name", "ranks", "microbatches"), SIZES)
def test_no_action_is_left_out_and_each_lane_has_numbers(name, ranks, microbatches):
    schedule = build(name, ranks, microbatches)
    drawn = svg(schedule)
    assert len(drawn) < 2_000_000
    root = ElementTree.fromstring(drawn)
    scale = PIXELS / float(root.get("viewBox").split()[2])
    assert actions_in(root) == Counter(action.op.value for row in schedule.rows for action in row)
    boxes, numbers = defaultdict(list), defaultdict(list)
    lanes = sorted(float(lane.get("y")) for lane in root.findall(f"{SVG}rect[@class='raypar-lane']"))
    for rect in root.findall(f"{SVG}g/{SVG}rect"):
        assert float(rect.get("width")) * scale >= 2
        lane = max(y for y in lanes if y <= float(rect.get("y")))
        boxes[lane].append((float(rect.get("x")) * scale, float(rect.get("width")) * scale))
    for number in root.findall(f"{SVG}text[@font-size]"):
        if re.match("[FBIW][0-9]", number.text):
            assert 0.7 * float(number.get("font-size")) * scale >= 9, "digits are 0.7 of the type"
            numbers[max(y for y in lanes if y <= float(number.get("y")))].append(float(number.get("x")) * scale)
    for lane, found in boxes.items():
        for (one, _), (other, width) in pairwise(sorted(found)):
            if other - one < 100:  # no bubble between them
                assert any(other - 100 <= x <= other + max(width, 100) for x in numbers[lane])


def test_titles_have_ranges():
    assert text(build("gpipe", 9, 32)).endswith("in flight 32 on all ranks")
    assert text(build("1f1b", 16, 32)).endswith("in flight 1 to 16")
    assert "versions 1 to 7" in text(build("pipedream", 9, 1, steps=12))


def test_adjoining_actions_that_are_narrow_are_one_box_for_each_kind():
    row = [Action(0, op, number) for number in range(4) for op in (Op.F, Op.B)]
    events = [Event(0, "pp=0", action, float(at), at + 1.0) for at, action in enumerate(row)]
    events.append(Event(0, "pp=0", Action(0, Op.W, 9), 8.0, 30.0))
    found = list(boxes_of(events, least=2, widest=100))
    assert [(box.name, box.start, box.end, box.band, box.bands) for box in found] == [
        ("0F0-3", 0, 8, 0, 2),
        ("0B0-3", 0, 8, 1, 2),
        ("0W9", 8, 30, 0, 1),
    ]
    assert len(list(boxes_of(events, least=0.5, widest=100))) == 9
    assert {box.end - box.start for box in boxes_of(events[:8], least=2, widest=4)} == {4}


def test_several_pictures_can_have_one_time_axis():
    one, other = build("gpipe", 4, 8), build("naive", 4, 8)
    span = simulate(other).makespan
    widths = {
        rect.get("width")
        for schedule in (one, other)
        for rect in ElementTree.fromstring(svg(schedule, span=span)).findall(f"{SVG}g[1]/{SVG}rect")
    }
    assert len(widths) == 1


def test_a_lowered_schedule_is_drawn_with_its_messages_and_step():
    schedule = lower(build("1f1b", 3, 4))
    root = ElementTree.fromstring(svg(schedule))
    found = Counter(box.find(f"{SVG}title").text.split(" on ")[0] for box in root.findall(f"{SVG}g"))
    assert found == Counter(str(action) for row in schedule.rows for action in row)
    words = {text.text for text in root.findall(f"{SVG}text")}
    assert {"SEND", "RECV, with waiting", "STEP"} <= words
    assert "1f1b (F 1, B 2): makespan 18, bubble 33.3%" in root.find(f"{SVG}title").text, "messages take no time in it"


def test_a_deadlock_is_drawn_as_far_as_it_goes():
    stuck = Schedule.of("stuck", ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    last = (
        "drawn as far as it goes, 2 of 8 actions: schedule 'stuck' does not come to its end: rank 0 at 0B0 waits for "
        "1B0 of rank 1 (check says more)"
    )
    assert text(stuck).splitlines() == [
        "rank 0  F0",
        "rank 1     F0",
        "stuck in slots: makespan 2, bubble 50.0%, in flight 1 1",
        last,
    ]
    root = ElementTree.fromstring(svg(stuck))
    assert len(root.findall(f"{SVG}g")) == 2
    assert last in root.find(f"{SVG}title").text


def test_a_picture_fits_what_contains_it_and_describes_itself():
    root = ElementTree.fromstring(svg(build("interleaved", 4, 8)))
    assert (root.get("role"), root.get("width"), root.get("height")) == ("img", "100%", None)
    assert root.find(f"{SVG}desc").text.startswith("4 ranks, 8 microbatches: a lane for each rank")
    assert float(root.get("viewBox").split()[2]) == 1000


def test_a_measured_action_that_is_too_short_is_drawn_all_the_same():
    timeline = simulate(build("zb-h1", 2, 4), Costs(f=1, i=1, w=1e-9))
    events = tuple(event for event in timeline.events if event.action.op in COMPUTE)
    assert actions_in(ElementTree.fromstring(svg(Timeline(timeline.schedule, events, measured=True))))["W"] == 8
