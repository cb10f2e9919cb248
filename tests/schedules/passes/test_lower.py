"""Lowering adds communication, reduction and the step, each where it belongs, and nothing twice."""

import pytest

from raypar.schedules import Costs, Schedule, ScheduleError, build, check, lower, simulate
from raypar.schedules.action import COMPUTE, Action, Op
from tests.support.schedules import spelled


def read(rows, **options):
    return Schedule.of("mine", [[Action.parse(word) for word in row.split()] for row in rows], **options)


def test_just_in_time_by_hand():
    assert spelled(lower(build("1f1b", 2, 2), reduce_grad=True)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD STEP",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD STEP",
    ]


def test_one_sweep_by_hand():
    assert spelled(lower(build("1f1b", 2, 2), "one_sweep")) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 STEP",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 STEP",
    ]


def test_values_that_stay_on_their_rank_are_not_sent():
    assert spelled(lower(read(["0F0 1F0 1B0 0B0"]))) == ["0F0 1F0 1B0 0B0 STEP"]
    v_shape = read(["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"])
    assert spelled(lower(v_shape)) == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0 STEP",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0 STEP",
    ]


def test_the_gradient_of_the_input_is_sent_before_the_weights_are_done():
    assert spelled(lower(read(["0F0 0B0", "1F0 1I0 1W0"])))[1] == "1RECV_F0 1F0 1I0 1SEND_B0 1W0 STEP"


@pytest.mark.parametrize("order", ["just_in_time", "one_sweep"])
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "forward"])
def test_lowering_keeps_the_compute_and_lowering_again_changes_nothing(name, order):
    schedule = build(name, 3, 6)
    lowered = lower(schedule, order, reduce_grad=True)
    assert lowered.lowered
    assert [[a for a in row if a.op in COMPUTE] for row in lowered] == [list(row) for row in schedule]
    assert lower(lowered, reduce_grad=True) == lowered
    assert lower(lower(schedule, order, step=False), reduce_grad=True) == lowered


def test_a_step_that_is_there_already_is_not_written_again():
    assert spelled(lower(read(["0F0 0B0 STEP 0RESHARD"]))) == ["0F0 0B0 STEP 0RESHARD"]


def test_an_evaluation_has_neither_reduction_nor_step():
    ops = {action.op for row in lower(build("forward", 2, 3), reduce_grad=True) for action in row}
    assert ops == {Op.F, Op.SEND_F, Op.RECV_F}


def test_a_pipeline_of_one_rank_is_lowered_too():
    lowered = lower(build("1f1b", 1, 2))
    assert lowered.lowered
    assert spelled(lowered) == ["0F0 0B0 0F1 0B1 STEP"]


@pytest.mark.parametrize(
    ("order", "says"),
    [("just_in_time", "1F1 needs 0F1, which nobody computes"), ("one_sweep", "rank 1 at 1F1 waits for 0F1 of rank 0")],
)
def test_a_value_that_nobody_computes_is_named(order, says):
    broken = read(["0F0 0B0", "1F0 1B0 1F1 1B1"])
    with pytest.raises(ScheduleError, match=says):
        lower(broken, order)


def test_an_unknown_order_is_refused():
    with pytest.raises(ScheduleError, match="'just_in_time' or 'one_sweep'"):
        lower(build("gpipe", 2, 2), "eager")


def test_blocking_sends_make_1f1b_slower():
    schedule, costs = build("1f1b", 4, 8), Costs(f=1, b=2, link=0.25)
    swept = lower(schedule, "one_sweep")
    times = [simulate(swept, costs, send_capacity=capacity).makespan for capacity in (0, 1, 8, None)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    with pytest.raises(ScheduleError, match="does not come to its end"):
        simulate(lower(schedule), costs, send_capacity=0)


def test_costs_of_links_stages_reduction_and_step_by_hand():
    schedule = build("naive", 2, 1)
    assert simulate(schedule, Costs(link=0.5)).makespan == 7
    assert simulate(lower(schedule), Costs(link=0.5)).makespan == 7
    assert simulate(lower(schedule, reduce_grad=True), Costs(reduce_grad=3, step=4)).makespan == 6 + 3 + 4
    assert simulate(schedule, Costs(of_stage={(1, Op.F): 10.0})).makespan == 15
    halves = read(["0F0 0I0 0W0"])
    assert simulate(halves, Costs(i=2, w=3)).makespan == 6


def test_a_receive_lasts_as_long_as_the_rank_waits_for_a_value_under_way():
    events = simulate(lower(build("forward", 2, 2)), Costs(link=0.5)).events
    times = {str(event.action): (event.start, event.end) for event in events}
    assert times["0SEND_F0"] == (1, 1)
    assert times["1RECV_F0"] == (1, 1.5)
    assert times["1F0"] == (1.5, 2.5)
    assert times["1RECV_F1"] == (2.5, 2.5)


def test_a_rendezvous_holds_both_ends():
    schedule = lower(build("forward", 2, 1), "one_sweep")
    times = {str(e.action): (e.start, e.end) for e in simulate(schedule, Costs(link=0.5), send_capacity=0).events}
    assert times["0SEND_F0"] == times["1RECV_F0"] == (1, 1.5)


def test_a_sender_waits_for_room():
    schedule = lower(build("forward", 2, 3))
    slow = Costs(of_stage={(1, Op.F): 10.0})
    times = {str(e.action): e.start for e in simulate(schedule, slow, send_capacity=1).events}
    assert (times["0SEND_F0"], times["0SEND_F1"], times["0SEND_F2"]) == (1, 2, 11)
    check(schedule, send_capacity=1)
