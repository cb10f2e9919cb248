"""Synchronous steps without a flush: no rank waits at their ends, and what may be wrong can be taken back."""

from __future__ import annotations

import pytest

from raypar.schedules import CheckError, Costs, Schedule, ScheduleError, build, check, lower, simulate
from raypar.schedules.passes.first_steps import first_steps
from raypar.schedules.passes.reduce_gradients import reduce_gradients
from raypar.schedules.passes.without_flush import without_flush
from raypar.schedules.versions import staleness

NAMES = ["naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches", "steps"), [(1, 2, 3), (2, 3, 2), (4, 8, 3), (3, 1, 2)])
def test_streams_of_steps_are_sound_and_no_gradient_is_late(name, ranks, microbatches, steps):
    stream = without_flush(build(name, ranks, microbatches), steps)
    lowered = lower(stream)
    for one in stream, lowered, reduce_gradients(lowered), first_steps(lowered, 1):
        check(one, send_capacity=8, max_versions=1)
    assert staleness(lowered).delays == ((0, 0),) * ranks
    assert Schedule.of(stream.name, lowered.rows, lowered=True) == lowered


def test_zero_bubbles_have_no_bubble_between_steps_either():
    costs = Costs(b=2.0)
    flushed, stream = (
        simulate(lower(one), costs) for one in (build("zb-h2", 8, 24), without_flush(build("zb-h2", 8, 24), 4))
    )
    assert (4 * flushed.makespan, stream.makespan) == (4 * 79, 4 * 72 + 7)


def test_a_validation_waits_for_the_updates_of_all_stages():
    costs = Costs(b=1.0, of_stage={(2, build("1f1b", 3, 2).rows[0][0].op): 50.0})
    timeline = simulate(lower(without_flush(build("1f1b", 3, 2), 2)), costs)
    ends = {str(event.action): event for event in timeline.events}
    last = max(ends[f"{stage}STEP0"].end for stage in range(3))
    assert all(ends[f"{stage}VALIDATE0"].start >= last for stage in range(3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda row: [*row[:-1]], "the row has 1 VALIDATE for 2 updates: give one for each STEP"),
        (lambda row: [one for one in row if one != "0VALIDATE0"], "0B3 comes between 0STEP0 and its VALIDATE"),
        (
            lambda row: swapped(row, "0SEND_F3", "0VALIDATE0"),
            "0SEND_F3 is between STEP0 and its VALIDATE, and 1RECV_F3 not",
        ),
    ],
)
def test_what_could_not_be_taken_back_is_told(change, says):
    rows = [[*map(str, row)] for row in lower(without_flush(build("1f1b", 2, 3), 2)).rows]
    rows[0] = change(rows[0])
    with pytest.raises(CheckError) as told:
        check(Schedule.of("changed", rows))
    assert says in str(told.value)


def swapped(row, one, other):
    places = {one: other, other: one}
    return [places.get(action, action) for action in row]


@pytest.mark.parametrize(
    ("name", "says"), [("zb-v", "4 stages on 2 ranks"), ("pipedream", "not the compute actions of")]
)
def test_what_has_no_such_stream_is_told(name, says):
    with pytest.raises(ScheduleError, match=says):
        without_flush(build(name, 2, 4), 2)
