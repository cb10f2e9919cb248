"""What a simulation comes to, without its events, agrees with its timeline."""

from __future__ import annotations

import tracemalloc

import pytest

from raypar.schedules import Costs, Op, ScheduleError, build, lower, simulate
from raypar.schedules.drawing.text import outcome_summary, summary
from raypar.schedules.passes.split_backward import split_backward
from raypar.schedules.simulation.simulate import outcome

COSTS = Costs(f=0.7, b=1.9, i=1.1, w=0.8, link=0.3, step=0.2, of_stage={(1, Op.F): 1.3})


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "forward"])
@pytest.mark.parametrize("window", [None, 0, 2])
def test_an_outcome_is_that_of_the_timeline(name, window):
    schedule = lower(build(name, 4, 8), order="one_sweep" if window == 0 else "just_in_time")
    for one in (schedule, schedule if name == "forward" else split_backward(schedule, COSTS, every=True)):
        timeline, found = simulate(one, COSTS, send_capacity=window), outcome(one, COSTS, send_capacity=window)
        assert found.makespan == timeline.makespan
        assert found.busy == tuple(timeline.busy(rank) for rank in range(4))
        assert found.in_flight == timeline.in_flight
        assert found.bubble == pytest.approx(timeline.bubble, abs=1e-12)
        assert outcome_summary(found) == summary(timeline)


def test_a_deadlock_is_told():
    with pytest.raises(ScheduleError, match="does not come to its end"):
        outcome(lower(build("1f1b", 2, 4)), send_capacity=0)


@pytest.mark.long
def test_no_event_is_kept():
    schedule = lower(build("1f1b", 16, 256))
    tracemalloc.start()
    try:
        outcome(schedule, send_capacity=8)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * schedule.num_actions, "an event takes more than ten times as much"
