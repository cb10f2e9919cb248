"""Backwards in halves: what leaves before one is over, what fills the waits, and what that is worth on paper."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.schedules import CheckError, Schedule, build, check, lower
from raypar.schedules.action import BACKWARDS, Op
from raypar.schedules.passes.gather_weights import gather_weights
from raypar.schedules.passes.split_backward import split_backward
from raypar.schedules.rules import provides
from raypar.schedules.simulation.simulate import Costs, simulate
from tests.support.schedules import legal_schedules, lowered_schedules, spelled

COSTS = Costs(f=1.0, b=2.0, i=1.0, w=1.0)
ROUNDING = 1e-9


def split(name, ranks, microbatches, costs=COSTS, **how):
    return split_backward(
        lower(build(name, ranks, microbatches), reduce_grad=how.pop("reduce_grad", False)), costs, **how
    )


def shorter(name, ranks, microbatches, costs=COSTS, **how):
    """By how much, and with what the ranks hold before and after."""
    before, after = (
        simulate(schedule, costs)
        for schedule in (
            lower(build(name, ranks, microbatches), reduce_grad=how.get("reduce_grad", False)),
            split(name, ranks, microbatches, costs, **how),
        )
    )
    return before.makespan - after.makespan, before.in_flight, after.in_flight


def test_gradients_leave_between_the_halves_of_a_backward():
    assert spelled(split("1f1b", 2, 2, reduce_grad=True)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD STEP",
        "1RECV_F0 1F0 1I0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1W0 1W1 1REDUCE_GRAD STEP",
    ]
    assert spelled(split("1f1b", 2, 2, hold=False))[1] == (
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1W1 STEP"
    )


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (3, 6), (4, 8), (4, 16), (8, 16)])
def test_1f1b_is_zb_h1(ranks, microbatches):
    """Of (p - 1) (F + B) of waits (p - 1) (F + I - W) are left, in the memory of 1F1B (Qi et al. 2023, table 2)."""
    saved, before, after = shorter("1f1b", ranks, microbatches)
    assert saved == pytest.approx(2 * (ranks - 1))
    assert max(after) == max(before) == ranks


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "least"),
    [("gpipe", 2, 8, 0.9), ("gpipe", 4, 8, 2.9), ("interleaved", 2, 8, 2), ("interleaved", 4, 8, 5)],
)
def test_other_pipelines_are_over_earlier_too(name, ranks, microbatches, least):
    saved, before, after = shorter(name, ranks, microbatches)
    assert saved >= least
    assert max(after) <= max(before)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved"])
def test_what_leaves_nothing_for_later_stays_whole(name):
    """Divided layers do all in I, and a single rank sends nothing."""
    whole = lower(build(name, 2, 4))
    assert split_backward(whole, Costs(f=1.0, b=2.0, i=2.0, w=0.0)) is whole
    if name != "interleaved":
        assert split(name, 1, 4) == lower(build(name, 1, 4))


def test_halves_of_a_schedule_of_its_own_are_left_as_they_are():
    once = split("1f1b", 2, 4)
    assert split_backward(once, COSTS) is once


def is_split(row):
    """Whether every backward of a row is an I and a W."""
    return all(action.op is not Op.B for action in row) and any(action.op is Op.W for action in row)


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_backward_may_be_split(name, ranks, hold):
    if name == "interleaved" and ranks == 1:
        return
    whole = lower(build(name, ranks, 4), reduce_grad=True)
    after = split_backward(whole, COSTS, every=True, hold=hold)
    check(after, send_capacity=8, max_in_flight=max(simulate(whole, COSTS).in_flight))
    same_step(whole, after)
    assert all(map(is_split, after.rows))


def test_what_a_schedule_of_its_own_has_whole_is_split_where_it_stands():
    mixed = lower(Schedule.of("mixed", ["0F0 0F1 0B0 0I1 0W1", "1F0 1I0 1W0 1F1 1B1"]))
    after = split_backward(mixed, COSTS, every=True)
    check(after, send_capacity=8)
    assert spelled(after) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0W0 0RECV_B1 0I1 0W1 STEP",
        "1RECV_F0 1F0 1I0 1SEND_B0 1W0 1RECV_F1 1F1 1I1 1SEND_B1 1W1 STEP",
    ]
    assert split_backward(after, COSTS, every=True) is after


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("1I0 1SEND_B0", "1W0 1I0 1SEND_B0", "order: rank 1, action 2: 1W0"),
        (" 1W0 ", " ", "stage 1 has no W of microbatch 0"),
        (" 1I0 ", " ", "stage 1 has no I of microbatch 0"),
        ("1W0 1W1 1REDUCE_GRAD", "1W0 1REDUCE_GRAD 1W1", "reduce: rank 1"),
        ("1W0 1W1 1REDUCE_GRAD STEP", "1W0 1REDUCE_GRAD STEP 1W1", "step: rank 1"),
        ("1W0 1W1", "1W0 1W1 1W1", "complete: rank 1"),
        ("1I0 1SEND_B0", "1SEND_B0 1I0", "order: rank 1, action 2: 1SEND_B0"),
    ],
)
def test_a_wrong_split_is_refused(right, wrong, says):
    first, second = spelled(split("1f1b", 2, 2, reduce_grad=True))
    assert right in second
    if "1W0" in wrong and "1W0" not in right:
        second = second.replace(" 1W0 ", " ", 1)
    made = second.replace(right, wrong, 1)
    with pytest.raises(CheckError) as caught:
        check(Schedule.of("wrong", [first, made]), send_capacity=8)
    assert says in str(caught.value)


@pytest.mark.long
def test_a_large_schedule_is_searched_in_bounded_time():
    saved, _, _ = shorter("1f1b", 16, 256)
    assert saved > 0


def order_of(row):
    """The microbatches of each stage in the order in which gradients of weights are made."""
    found = defaultdict(list)
    for stage, op, microbatch, _ in row:
        if op in (Op.B, Op.W):
            found[stage].append(microbatch)
    return found


def same_step(before, after):
    """Each rank does the same, sends and receives in the same order, and adds up gradients in the same order."""
    for row, halved in zip(before.rows, after.rows, strict=True):
        provided = [{value for action in one for value in provides(action)} for one in (row, halved)]
        assert provided[0] == provided[1]
        assert [a for a in halved if a.op not in BACKWARDS] == [a for a in row if a.op not in BACKWARDS]
        assert order_of(halved) == order_of(row)


@given(
    name=st.sampled_from(["naive", "gpipe", "1f1b", "interleaved"]),
    ranks=st.integers(1, 5),
    rounds=st.integers(1, 4),
    order=st.sampled_from(["just_in_time", "one_sweep"]),
    reduce_grad=st.booleans(),
    hold=st.booleans(),
    last=st.floats(0.5, 2.0),
)
def test_it_is_the_same_step_and_never_later(name, ranks, rounds, order, reduce_grad, hold, last):
    schedule = lower(build(name, ranks, ranks * rounds), order, reduce_grad=reduce_grad)
    end = schedule.num_stages - 1
    costs = Costs(
        i=1.1, w=0.9, of_stage={(end, Op.F): last, (end, Op.B): 2 * last, (end, Op.I): last, (end, Op.W): last}
    )
    after = split_backward(schedule, costs, hold=hold)
    before = simulate(schedule, costs)
    check(after, send_capacity=0 if order == "one_sweep" else None, max_in_flight=max(before.in_flight))
    same_step(schedule, after)
    assert simulate(after, costs).makespan <= before.makespan + ROUNDING
    if not hold:
        assert simulate(after, costs).in_flight == before.in_flight


@given(schedule=legal_schedules(), reduce_grad=st.booleans(), every=st.booleans())
def test_any_schedule_stays_the_same_step(schedule, reduce_grad, every):
    if schedule.forward_only:
        return
    lowered = lower(schedule, reduce_grad=reduce_grad)
    after = split_backward(lowered, COSTS, every=every)
    assert not every or all(is_split(row) for row in after.rows if any(a.op in BACKWARDS for a in row))
    check(after, max_in_flight=max(simulate(lowered, COSTS).in_flight))
    same_step(lowered, after)


@given(schedule=lowered_schedules(), every=st.booleans(), hold=st.booleans())
def test_gathers_and_reductions_stay_sound_and_a_weight_gradient_may_come_when_weights_are_freed(schedule, every, hold):
    after = split_backward(schedule, Costs(unshard=0.5, reduce_grad=0.25, link=0.5), every=every, hold=hold)
    check(after)
    kinds = (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)
    for before, row in zip(schedule.rows, after.rows, strict=True):
        assert [action for action in row if action.op in kinds] == [action for action in before if action.op in kinds]


def test_a_weight_gradient_is_not_made_to_free_weights():
    whole = lower(gather_weights(build("1f1b", 2, 2), "microbatch"))
    row = spelled(split_backward(whole, COSTS, every=True))[1]
    assert "1I0 1SEND_B0 1RESHARD 1UNSHARD 1RECV_F1 1F1 1RESHARD" in row, "W0 comes later"
    assert row.endswith("1I1 1SEND_B1 1W0 1RESHARD 1W1 STEP")
