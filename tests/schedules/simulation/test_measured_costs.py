"""Costs read off timelines: those of a simulated one are the costs it was made with."""

import pytest

from raypar.schedules import Costs, Event, Schedule, Timeline, build, costs_of, lower, simulate
from raypar.schedules.action import STEP, Action, Op


def known(schedule, link=0.25):
    stages = range(schedule.num_stages)
    shares = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.25, Op.W: 0.75, Op.REDUCE_GRAD: 0.5, Op.SEND_F: 0.125, Op.SEND_B: 0.0625}
    return Costs(
        step=0.5, link=link, of_stage={(s, op): share + s / 16 for s in stages for op, share in shares.items()}
    )


@pytest.mark.parametrize("reduce_grad", [False, True])
@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("naive", 2, 3), ("gpipe", 3, 5), ("1f1b", 4, 8)])
def test_the_costs_of_a_simulated_step_are_those_it_was_made_with(name, ranks, microbatches, reduce_grad):
    schedule = lower(build(name, ranks, microbatches), reduce_grad=reduce_grad)
    made_with = known(schedule)
    timeline = simulate(schedule, made_with)
    found = costs_of(timeline)
    assert (found.step, found.link) == pytest.approx((0.5, 0.25))
    for event in timeline.events:
        if event.action.stage is not None and event.action.op not in (Op.RECV_F, Op.RECV_B):
            assert found.of(event.action) == pytest.approx(made_with.of(event.action)), event.action
    assert [*simulate(schedule, found).events] == [
        event._replace(start=pytest.approx(event.start), end=pytest.approx(event.end)) for event in timeline.events
    ]


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("link", [0.0, 0.25, 3.0])
def test_the_same_step_is_predicted_whoever_waits_for_whom(link, lowered):
    schedule = build("interleaved", 2, 4)
    schedule = lower(schedule) if lowered else schedule
    timeline = simulate(schedule, known(schedule, link))
    again = simulate(schedule, costs_of(timeline))
    assert (again.makespan, again.bubble) == pytest.approx((timeline.makespan, timeline.bubble))


def test_a_backward_in_halves_has_two_costs():
    words = ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"]
    schedule = lower(Schedule.of("halves", [[Action.parse(word) for word in row.split()] for row in words]))
    found = costs_of(simulate(schedule, known(schedule)))
    assert (found.of_stage[0, Op.I], found.of_stage[1, Op.W]) == pytest.approx((1.25, 0.75 + 1 / 16))


def test_what_was_held_up_once_does_not_count():
    schedule = lower(build("1f1b", 2, 8))
    usual, held_up = simulate(schedule, Costs(link=0.25)), simulate(schedule, Costs(f=9.0, link=5.0, step=7.0))
    one = tuple(
        event._replace(end=event.end + 40.0) if event.action == Action(1, Op.B, 7) else event for event in usual.events
    )
    found = costs_of(Timeline(schedule, one), usual, held_up)
    assert (found.of_stage[1, Op.B], found.of_stage[0, Op.F], found.link, found.step) == (2.0, 1.0, 0.25, 0.0)


def test_an_action_has_its_own_cost_from_three_steps_on():
    schedule = lower(build("gpipe", 2, 4))
    quick = simulate(schedule, Costs(f=2.0, of_action={Action(0, Op.F, 0): 0.5}))
    two, three = costs_of(quick, quick), costs_of(quick, quick, simulate(schedule, Costs(f=9.0)))
    assert [two.of(Action(0, Op.F, microbatch)) for microbatch in range(4)] == [2.0] * 4
    assert [three.of(Action(0, Op.F, microbatch)) for microbatch in range(4)] == [0.5, 2.0, 2.0, 2.0]
    assert simulate(schedule, three).makespan == quick.makespan


def test_a_step_lasts_from_the_last_rank_s_start():
    schedule = lower(build("gpipe", 2, 1))
    events = (Event(0, "pp=0", STEP, 5.0, 6.5), Event(1, "pp=1", STEP, 2.0, 6.25))
    assert costs_of(Timeline(schedule, events)).step == 1.5


def test_a_late_receive_says_little_of_the_link():
    schedule = lower(build("gpipe", 2, 2))
    events = [(0, "0F0", 0, 1), (0, "0SEND_F0", 1, 1), (0, "0F1", 1, 2), (0, "0SEND_F1", 2, 2)]
    events += [(1, "1RECV_F0", 0, 1.5), (1, "1F0", 1.5, 9), (1, "1RECV_F1", 9, 9.25)]
    timeline = Timeline(schedule, tuple(Event(r, f"pp={r}", Action.parse(a), s, e) for r, a, s, e in events))
    assert costs_of(timeline).link == 0.5
    nobody_waits = Timeline(schedule, tuple(event for event in timeline.events if event.action.microbatch != 0))
    late = [event._replace(start=3.0) if event.action.op is Op.RECV_F else event for event in nobody_waits.events]
    assert costs_of(Timeline(schedule, (Event(1, "pp=1", Action(1, Op.F, 0), 0.0, 3.0), *late))).link == 7.25


def test_reductions_beside_the_actions_cost_no_rank_its_time():
    schedule = lower(build("1f1b", 2, 4), reduce_grad=True)
    timeline = simulate(schedule, known(schedule))
    bucket = Event(1, "pp=1", Action(1, Op.REDUCE_GRAD, None), 3.0, 90.0, bucket=0)
    assert costs_of(Timeline(schedule, (*timeline.events, bucket))) == costs_of(timeline)


def test_what_did_not_happen_costs_nothing():
    schedule = lower(build("1f1b", 2, 4))
    assert costs_of() == costs_of(Timeline(schedule, ())) == Costs(0.0, 0.0, 0.0, 0.0, of_stage={})
    assert simulate(schedule, costs_of()).makespan == 0
