"""Gathers on paper: when they run, what they hold and what they move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.schedules import Costs, Event, Schedule, Timeline, build, costs_of, lower, simulate
from raypar.schedules.action import Action, Op
from raypar.schedules.passes.gather_weights import gather_weights
from raypar.schedules.passes.reduce_gradients import reduce_gradients
from raypar.schedules.rules import USES_WEIGHTS, most_whole
from raypar.schedules.simulation.memory import Peak, Traffic, peaks, traffic
from tests.support.schedules import lowered_schedules

TWO = Schedule.of("two stages", ["0F0 1F0 1B0 0B0"])


def times(schedule, costs):
    return [(str(event.action), event.start, event.end) for event in simulate(schedule, costs).events]


def test_a_gather_runs_under_the_action_before_and_behind_the_gathers_before_it():
    assert times(gather_weights(TWO, "step"), Costs(unshard=0.75)) == [
        ("0UNSHARD", 0, 0.75),
        ("1UNSHARD", 0.75, 1.5),
        ("0F0", 0.75, 1.75),
        ("1F0", 1.75, 2.75),
        ("1B0", 2.75, 4.75),
        ("1RESHARD", 4.75, 4.75),
        ("0B0", 4.75, 6.75),
        ("0RESHARD", 6.75, 6.75),
    ]
    exposed = simulate(gather_weights(TWO, "microbatch"), Costs(unshard=0.75))
    assert exposed.makespan == 6 + 4 * 0.75
    assert simulate(gather_weights(TWO, "step", resident=1), Costs(unshard=0.75)).makespan == 6 + 3 * 0.75


def test_a_gather_of_what_is_whole_takes_no_time():
    again = Schedule.of("again", ["0UNSHARD 0F0 0UNSHARD 0B0 0RESHARD"])
    assert simulate(again, Costs(unshard=5)).makespan == 5 + 3


def test_a_gather_runs_while_the_rank_waits_for_a_value():
    schedule = gather_weights(lower(build("naive", 2, 1)), "microbatch")
    events = {str(event.action): event for event in simulate(schedule, Costs(unshard=0.5, link=0.25)).events}
    assert (events["1F0"].start, events["1RECV_F0"].end) == (1.75, 1.75)


def test_the_units_of_a_gather_arrive_while_an_action_that_alone_needs_them_runs():
    alone = gather_weights(TWO, "microbatch")
    assert [end - start for name, start, end in times(alone, Costs(unshard=0.5, units=4)) if name == "0F0"] == [1.0]
    assert simulate(alone, Costs(unshard=0.5, units=4)).makespan == 6 + 4 * 0.125, (
        "the first unit of each is waited for"
    )
    slow = times(alone, Costs(unshard=2.0, units=4))
    assert slow[1] == ("0F0", 0.5, 2.25), "the last unit arrives at 2, and a quarter of the forward is left then"
    step = gather_weights(TWO, "step")
    assert times(step, Costs(unshard=2.0, units=4)) == times(step, Costs(unshard=2.0))
    assert peaks(simulate(alone), (100, 10), (0, 0), units=4) == (Peak(50, 50, 0),)
    assert peaks(simulate(step), (100, 10), (0, 0), units=4) == peaks(simulate(step), (100, 10), (0, 0))


@pytest.mark.parametrize(("beside", "makespan"), [(False, 6 + 2 * 3 + 1), (True, 2 + 2 + 3 + 3 + 1)])
def test_a_reduction_occupies_its_rank_or_runs_beside_it_and_the_step_waits(beside, makespan):
    schedule = lower(reduce_gradients(build("gpipe", 1, 2), "microbatch"))
    costs = Costs(reduce_grad=3, step=1, reduce_beside=beside)
    assert simulate(schedule, costs).makespan == makespan


def test_a_reduction_beside_the_actions_starts_under_its_backward_and_ends_behind_it():
    """The backward takes 4, and makes the gradients of a unit in 1."""
    schedule = lower(reduce_gradients(build("gpipe", 1, 1)))

    def reduced(seconds):
        timeline = simulate(schedule, Costs(b=4, reduce_grad=seconds, reduce_beside=True, units=4))
        (found,) = [event for event in timeline.events if event.action.op is Op.REDUCE_GRAD]
        return found.start, found.end, timeline.makespan

    assert reduced(2) == (3.5, 5.5, 5.5), "its last unit is made at 5 and takes 0.5"
    assert reduced(8) == (2, 10, 10), "its first unit is made at 2"


@given(schedule=lowered_schedules(), unshard=st.sampled_from([0.0, 0.5, 3.0]), beside=st.booleans())
def test_weights_have_arrived_where_they_are_used_and_a_link_does_one_thing_at_a_time(schedule, unshard, beside):
    costs = Costs(unshard=unshard, reduce_grad=0.5, link=0.25, step=1.0, reduce_beside=beside)
    timeline = simulate(schedule, costs)
    assert sorted(map(str, (event.action for event in timeline.events))) == sorted(
        str(action) for row in schedule.rows for action in row
    )
    arrives, free = {}, [0.0] * schedule.num_ranks
    for event in timeline.events:
        if event.action.op in (Op.UNSHARD, Op.REDUCE_GRAD):
            assert event.start >= free[event.rank]
            free[event.rank] = event.end
        if event.action.op is Op.UNSHARD:
            arrives[event.action.stage] = event.end
        elif event.action.op in USES_WEIGHTS:
            assert event.start >= arrives.get(event.action.stage, 0.0)
        elif event.action.op is Op.STEP:
            assert event.start >= free[event.rank]
    assert timeline.makespan >= simulate(schedule, Costs(link=0.25)).makespan


def test_costs_are_read_off_a_timeline_with_gathers():
    schedule = lower(reduce_gradients(gather_weights(build("1f1b", 2, 3), "microbatch"), "microbatch"))
    costs = Costs(unshard=0.5, reduce_grad=0.25)
    read = costs_of(simulate(schedule, costs))
    assert simulate(schedule, read) == simulate(schedule, costs)


def test_a_measured_gather_is_that_of_its_units_or_of_the_action_itself():
    schedule = lower(gather_weights(build("naive", 1, 1), "microbatch"))
    unshard = Action.parse("0UNSHARD")
    whole = [Event(0, "pp=0", unshard, start, start + 1.0) for start in (0.0, 10.0)]
    units = [Event(0, "pp=0", unshard, float(start), start + 0.25, bucket=start % 4) for start in range(8)]
    for events, cost in ((whole, 1.0), (units, 1.0), ([*whole, *units[:4]], 0.5)):
        assert costs_of(Timeline(schedule, tuple(events), measured=True)).of(unshard) == cost


def test_peaks_and_traffic_by_hand():
    weights, activations = (100, 10), (1, 2)
    step, one = gather_weights(TWO, "step"), gather_weights(TWO, "microbatch")
    assert peaks(simulate(TWO), weights, activations) == (Peak(113, 110, 3),)
    assert peaks(simulate(step), weights, activations) == (Peak(113, 110, 3),)
    assert peaks(simulate(one), weights, activations) == (Peak(101, 100, 3),)
    assert traffic(reduce_gradients(one), weights, (50, 5), 4) == (Traffic(2, 1, 150, 37), Traffic(2, 1, 15, 3))
    assert traffic(TWO, weights, weights, 4) == (Traffic(0, 0, 0, 0),) * 2
    forward = gather_weights(build("forward", 1, 3), "microbatch")
    assert peaks(simulate(forward), (100,), (7,)) == (Peak(107, 100, 7),)


@given(schedule=lowered_schedules())
def test_peaks_of_ones_are_the_counts_of_the_rows(schedule):
    timeline, none = simulate(schedule), [0] * schedule.num_stages
    assert tuple(peak.weights for peak in peaks(timeline, [1] * schedule.num_stages, none)) == most_whole(schedule)
    assert tuple(peak.activations for peak in peaks(timeline, none, [1] * schedule.num_stages)) == timeline.in_flight
