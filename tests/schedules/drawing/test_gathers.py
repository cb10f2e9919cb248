"""Gathers in pictures: when a stage is whole, and what its gather and its reductions run beside."""

from __future__ import annotations

import re

from raypar.schedules import Costs, Schedule, build, chrome_trace, lower, simulate, svg, text
from raypar.schedules.action import Action
from raypar.schedules.passes.gather_weights import gather_weights
from raypar.schedules.passes.reduce_gradients import reduce_gradients

ONE = gather_weights(Schedule.of("mine", ["0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"]), "step", resident=1)


def test_brackets_show_when_a_stage_is_whole():
    assert text(ONE).splitlines() == [
        "rank 0  (0F0   0F1) (1F0   1F1   1B0   1B1) (0B0   0B1)",
        "( before an action: UNSHARD gathers its stage's weights; ) after it: RESHARD frees them",
        "mine in slots: makespan 8, bubble 0.0%, in flight 4",
    ]
    first = text(gather_weights(build("naive", 2, 1), "microbatch"), done=[Action.parse("0F0")]).splitlines()[0]
    assert first == "rank 0  (F0)           (b0)"
    assert text(simulate(gather_weights(build("naive", 1, 1), "microbatch"))).startswith("rank 0  (F0) (B0   --)")
    cursor = text(gather_weights(build("naive", 1, 1), "step"), cursor=Action.parse("0B0")).splitlines()[0]
    assert cursor == "rank 0   (F0  > B0)"
    assert "(" not in text(build("1f1b", 2, 2))


def test_thin_lines_show_gathers_and_what_is_whole():
    timeline = simulate(ONE, Costs(unshard=0.5))
    picture = svg(timeline)
    assert picture.count('class="raypar-whole"') == 3
    assert len(re.findall(r"<title>[01]UNSHARD \(unit 0\) on pp=0: ", picture)) == 3
    assert "stage 1 is whole on pp=0" in picture
    assert "gathering, reducing" in picture and "thin line: weights whole" in picture
    assert svg(ONE).count('class="raypar-whole"') == 3
    plain = svg(build("1f1b", 2, 2))
    assert "raypar-whole" not in plain and "weights whole" not in plain


def test_gathers_and_reductions_have_tracks_of_their_own_in_a_trace():
    schedule = lower(reduce_gradients(gather_weights(build("1f1b", 2, 2), "microbatch"), "microbatch"))
    events = chrome_trace(simulate(schedule, Costs(unshard=0.5, reduce_grad=0.25, reduce_beside=True)))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in slices if "UNSHARD" in event["name"] or "REDUCE" in event["name"]} == {1}
    assert sum(event["name"] == "1UNSHARD unit 0" for event in slices) == 4
    assert sum(event["name"] == "1REDUCE_GRAD bucket 0" for event in slices) == 2
    assert {event["tid"] for event in slices if event["cat"] == "compute"} == {0}
