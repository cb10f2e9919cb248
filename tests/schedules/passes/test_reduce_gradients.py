"""REDUCE_GRAD comes after the last weight gradient of a stage, or after each."""

from __future__ import annotations

import pytest
from hypothesis import given

from raypar.schedules import Schedule, build, check, lower
from raypar.schedules.action import Op
from raypar.schedules.passes.reduce_gradients import reduce_gradients
from tests.support.schedules import catalog_schedules, spelled


@pytest.mark.parametrize(
    ("when", "row"),
    [
        ("step", "1F0 1I0 1SEND_B0 1W0 1F1 1I1 1SEND_B1 1W1 1REDUCE_GRAD STEP"),
        ("microbatch", "1F0 1I0 1SEND_B0 1W0 1REDUCE_GRAD 1F1 1I1 1SEND_B1 1W1 1REDUCE_GRAD STEP"),
    ],
)
def test_by_hand(when, row):
    halves = Schedule.of("halves", ["0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1I1 1W1"])
    found = spelled(reduce_gradients(lower(halves), when))[1]
    assert found.replace("1RECV_F0 ", "").replace("1RECV_F1 ", "") == row
    assert reduce_gradients(lower(halves)) == lower(halves, reduce_grad=True)


def test_the_send_and_the_gathers_go_first():
    rows = ["0F0 0F1 0B0 0B1", "1UNSHARD 1F0 1B0 1SEND_B0 1RESHARD 1UNSHARD 1F1 1B1 1SEND_B1 1RESHARD"]
    found = reduce_gradients(Schedule.of("mine", rows), "microbatch")
    assert spelled(found) == [
        "0F0 0F1 0B0 0REDUCE_GRAD 0B1 0REDUCE_GRAD",
        "1UNSHARD 1F0 1B0 1SEND_B0 1RESHARD 1UNSHARD 1REDUCE_GRAD 1F1 1B1 1SEND_B1 1RESHARD 1REDUCE_GRAD",
    ]
    assert reduce_gradients(found, "step") == found, "what is there stays"


def test_an_evaluation_is_left_as_it_is():
    assert reduce_gradients(build("forward", 2, 3), "microbatch") == build("forward", 2, 3)


@given(schedule=catalog_schedules())
def test_both_pass_the_check_before_and_after_lowering(schedule):
    backward = 0 if schedule.forward_only else schedule.num_stages
    for when, times in (("step", 1), ("microbatch", schedule.num_microbatches)):
        for found in (lower(reduce_gradients(schedule, when)), reduce_gradients(lower(schedule), when)):
            check(found)
            assert sum(action.op is Op.REDUCE_GRAD for row in found for action in row) == backward * times
