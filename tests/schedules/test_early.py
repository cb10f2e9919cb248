"""Early sends: what leaves before its backward is over, and what that is worth on paper."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypar.schedules import build, check, lower
from raypar.schedules.action import Op
from raypar.schedules.early import with_early_sends
from raypar.schedules.rules import provides
from raypar.schedules.simulate import Costs, simulate
from tests.schedules.test_lower import spelled

COSTS = Costs(f=1.0, b=2.0, i=1.0, w=1.0)


def early(name, ranks, microbatches):
    return with_early_sends(lower(build(name, ranks, microbatches), reduce_grad=True))


def test_behind_the_last_forward_gradients_leave_between_the_halves():
    assert spelled(early("1f1b", 2, 2)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD STEP",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1W1 1REDUCE_GRAD STEP",
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 8), (3, 6), (4, 8), (8, 16)])
def test_a_pipeline_is_over_earlier(name, ranks, microbatches):
    before = simulate(lower(build(name, ranks, microbatches)), COSTS)
    after = simulate(early(name, ranks, microbatches), COSTS)
    assert before.makespan - after.makespan == ranks - 1
    assert after.in_flight == before.in_flight


def test_the_long_drain_of_many_microbatches_stays_whole():
    assert early("gpipe", 2, 9) == lower(build("gpipe", 2, 9), reduce_grad=True)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["naive", "gpipe", "1f1b", "interleaved"]),
    ranks=st.integers(1, 5),
    rounds=st.integers(1, 4),
    order=st.sampled_from(["just_in_time", "one_sweep"]),
)
def test_it_is_the_same_step_and_never_later(name, ranks, rounds, order):
    schedule = lower(build(name, ranks, ranks * rounds), order, reduce_grad=True)
    after = with_early_sends(schedule)
    check(after, send_capacity=0 if order == "one_sweep" else None, max_in_flight=max(simulate(schedule).in_flight))
    assert with_early_sends(after) == after
    for row, halved in zip(schedule.rows, after.rows, strict=True):
        provided = [{value for action in one for value in provides(action)} for one in (row, halved)]
        assert provided[0] == provided[1]
        assert [a for a in halved if a.op not in (Op.B, Op.I, Op.W)] == [a for a in row if a.op is not Op.B]
    assert simulate(after, COSTS).makespan <= simulate(schedule, COSTS).makespan
