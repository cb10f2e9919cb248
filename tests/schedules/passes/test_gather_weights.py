"""UNSHARD and RESHARD: weights are whole where they are needed, as seldom gathered and as early freed as was asked."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.schedules import Costs, Schedule, ScheduleError, build, check, lower, simulate
from raypar.schedules.action import COMPUTE, SENDS, Op
from raypar.schedules.passes.gather_weights import gather_weights
from raypar.schedules.rules import USES_WEIGHTS, most_whole
from tests.support.schedules import catalog_schedules, spelled


def gathers_of(schedule):
    """The number of UNSHARDs of each stage."""
    return Counter(action.stage for row in schedule for action in row if action.op is Op.UNSHARD)


def both(schedule, when, **how):
    """The placement before and after lowering, which ``check`` has passed."""
    found = [lower(gather_weights(schedule, when, **how)), gather_weights(lower(schedule), when, **how)]
    for one in found:
        check(one)
        assert simulate(one, Costs(unshard=0.5)).events, "it comes to its end"
        for row in one.rows:
            for action, after in pairwise(row):
                assert not (action.op in (Op.UNSHARD, Op.RESHARD) and after.op in SENDS), "a SEND is never delayed"
        assert [[a for a in row if a.op in COMPUTE] for row in one] == [
            [a for a in row if a.op in COMPUTE] for row in schedule
        ]
    return found


@pytest.mark.parametrize(
    ("how", "rows"),
    [
        (
            {"when": "step"},
            [
                "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0RESHARD STEP",
                "1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RESHARD STEP",
            ],
        ),
        (
            {"when": "microbatch"},
            [
                "0UNSHARD 0F0 0SEND_F0 0RESHARD 0UNSHARD 0F1 0SEND_F1 0RESHARD "
                "0UNSHARD 0RECV_B0 0B0 0RESHARD 0UNSHARD 0RECV_B1 0B1 0RESHARD STEP",
                "1UNSHARD 1RECV_F0 1F0 1RESHARD 1UNSHARD 1B0 1SEND_B0 1RESHARD "
                "1UNSHARD 1RECV_F1 1F1 1RESHARD 1UNSHARD 1B1 1SEND_B1 1RESHARD STEP",
            ],
        ),
        (
            {"when": "microbatch", "reshard_after_forward": "except_last"},
            [
                "0UNSHARD 0F0 0SEND_F0 0RESHARD 0UNSHARD 0F1 0SEND_F1 0RESHARD "
                "0UNSHARD 0RECV_B0 0B0 0RESHARD 0UNSHARD 0RECV_B1 0B1 0RESHARD STEP",
                "1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RESHARD STEP",
            ],
        ),
    ],
)
def test_by_hand(how, rows):
    assert spelled(gather_weights(lower(build("1f1b", 2, 2)), **how)) == rows


def test_windows_of_forward_and_backward_are_one_if_weights_stay_whole_between_them():
    rows = ["0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"]
    found = gather_weights(Schedule.of("mine", rows), "microbatch", reshard_after_forward=False)
    assert spelled(found) == ["0UNSHARD 0F0 1UNSHARD 1F0 0F1 1F1 1B0 0B0 1B1 1RESHARD 0B1 0RESHARD"]
    rows = ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"]
    found = gather_weights(Schedule.of("mine", rows), "microbatch", reshard_after_forward=False)
    assert spelled(found) == ["0UNSHARD 0F0 1UNSHARD 1F0 1B0 1RESHARD 0B0 0F1 1UNSHARD 1F1 1B1 1RESHARD 0B1 0RESHARD"]


def test_of_two_stages_one_is_whole_while_the_other_computes():
    rows = ["0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"]
    one = "0UNSHARD 0F0 0F1 0RESHARD 1UNSHARD 1F0 1F1 1B0 1B1 1RESHARD 0UNSHARD 0B0 0B1 0RESHARD"
    assert spelled(gather_weights(Schedule.of("mine", rows), "step", resident=1)) == [one]
    two = "0UNSHARD 0F0 1UNSHARD 0F1 1F0 1F1 1B0 1B1 1RESHARD 0B0 0B1 0RESHARD"
    assert spelled(gather_weights(Schedule.of("mine", rows), "step", resident=2)) == [two]


def test_the_stage_that_is_needed_again_last_gives_way_one_action_ahead():
    rows = ["0F0 1F0 2F0 2B0 1B0 0B0"]
    assert spelled(gather_weights(Schedule.of("mine", rows), "step", resident=2)) == [
        "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 2F0 2B0 2RESHARD 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD"
    ]


def test_the_gather_runs_under_a_weight_gradient_which_needs_no_weights():
    rows = ["0F0 1F0 1I0 1W0 0I0 0W0"]
    assert spelled(gather_weights(Schedule.of("mine", rows), "step", resident=1)) == [
        "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1I0 1RESHARD 0UNSHARD 1W0 0I0 0RESHARD 0W0"
    ]


def test_gathers_of_its_own_are_left_as_they_are():
    own = Schedule.of("torch's", ["0UNSHARD 0F0 0B0 0RESHARD", "1F0 1B0"])
    assert gather_weights(own, "microbatch") is own


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"when": "layer"}, "can't be gathered once a layer: take 'step' or 'microbatch'"),
        ({"when": "step", "resident": 0}, "resident=0: a stage must be whole to compute"),
        ({"when": "microbatch", "resident": 2}, "resident=2 bounds what is whole during a step"),
    ],
)
def test_what_makes_no_sense_is_refused(how, says):
    with pytest.raises(ScheduleError, match=says):
        gather_weights(build("gpipe", 2, 2), **how)


@given(schedule=catalog_schedules())
def test_once_a_step_every_stage_is_gathered_once(schedule):
    for found in both(schedule, "step"):
        assert set(gathers_of(found).values()) == {1}
        assert len(gathers_of(found)) == schedule.num_stages


@given(schedule=catalog_schedules())
def test_once_a_microbatch_every_use_has_its_own_gather_and_one_stage_is_whole_at_a_time(schedule):
    uses = Counter(action.stage for row in schedule for action in row if action.op in USES_WEIGHTS)
    assert set(uses.values()) == {schedule.num_microbatches * (1 if schedule.forward_only else 2)}
    for found in both(schedule, "microbatch"):
        assert gathers_of(found) == uses
        assert most_whole(found) == (1,) * schedule.num_ranks


@given(schedule=catalog_schedules())
def test_weights_that_stay_whole_between_forward_and_backward_are_gathered_no_more_often(schedule):
    last = schedule.num_stages - 1
    freed, kept, mixed = (
        [gathers_of(one) for one in both(schedule, "microbatch", reshard_after_forward=after)]
        for after in (True, False, "except_last")
    )
    for most, least, between in zip(freed, kept, mixed, strict=True):
        for stage in range(schedule.num_stages):
            assert least[stage] <= most[stage]
            assert between[stage] == (least if stage == last else most)[stage]


@given(schedule=catalog_schedules(), resident=st.integers(1, 4))
def test_no_more_stages_are_whole_than_may_be_and_gathers_are_no_more_than_need_be(schedule, resident):
    placements = both(schedule, "step", resident=resident), both(schedule, "step", resident=resident + 1)
    most = gathers_of(gather_weights(schedule, "microbatch")).total()
    for found, roomier in zip(*placements, strict=True):
        assert max(most_whole(found)) <= resident
        assert gathers_of(roomier).total() <= gathers_of(found).total() <= most
    if resident >= schedule.num_stages // schedule.num_ranks:
        assert placements[0] == both(schedule, "step")
