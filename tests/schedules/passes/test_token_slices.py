"""Token slices: any synchronous schedule in them is in order, proved, with the memory and the bubble of the paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypar.schedules import CheckError, Schedule, ScheduleError, build, check, lower, simulate
from raypar.schedules.action import Action, Op
from raypar.schedules.passes.token_slices import with_slices
from raypar.schedules.rules import most_in_flight
from raypar.schedules.simulation.simulate import Costs
from tests.support.schedules import ONE_ROW_A_RANK


def sliced(name, ranks, microbatches, slices):
    return with_slices(build(name, ranks, microbatches * slices), slices)


def in_order(schedule, slices):
    """Whether each stage's forwards of a microbatch come by slice, and its I (or B) the other way round."""
    for row in schedule.rows:
        for op, wanted in (Op.F, 1), (Op.B, -1), (Op.I, -1):
            seen = {}
            for action in row:
                halves = (Op.B, Op.I) if op is not Op.F else (Op.F,)
                if action.op in halves:
                    seen.setdefault((action.stage, action.microbatch // slices), []).append(action.microbatch % slices)
            if any(found != [*range(slices)][::wanted] for found in seen.values()):
                return False
    return True


@pytest.mark.parametrize("name", ONE_ROW_A_RANK)
@pytest.mark.parametrize(("ranks", "microbatches", "slices"), [(1, 2, 3), (2, 3, 2), (3, 2, 4), (4, 5, 2)])
def test_every_synchronous_schedule_in_slices_is_in_order_and_sound(name, ranks, microbatches, slices):
    schedule = sliced(name, ranks, microbatches, slices)
    assert in_order(schedule, slices)
    assert schedule.microbatches_a_step == microbatches
    check(schedule)
    check(lower(schedule), send_capacity=8)
    check(lower(schedule, "one_sweep"), send_capacity=0)
    assert with_slices(schedule, slices) is schedule
    again = Schedule.of("again", schedule.rows)
    assert with_slices(again, slices).rows == schedule.rows, "rows that are in order stay"


def test_1f1b_in_slices_is_the_papers_schedule():
    """Rank s of p performs p - s + k - 1 forwards before its first backward, that of microbatch 0's last slice."""
    p, m, k = 4, 6, 3
    schedule = sliced("1f1b", p, m, k)
    for rank, row in enumerate(schedule.rows):
        first = next(at for at, action in enumerate(row) if action.op is Op.B)
        assert first == p - rank + k - 1
        assert row[first] == Action(rank, Op.B, k - 1)
    assert most_in_flight(schedule) == tuple(p - rank + k - 1 for rank in range(p))


@pytest.mark.parametrize(("p", "m", "k"), [(2, 4, 2), (4, 8, 4), (8, 16, 4)])
def test_bubble_and_memory_fall_as_in_the_paper(p, m, k):
    """Source: Sun et al. 2024, section 3: (p - 1) / (mk + p - 1) idle, (p + k - 1) / k microbatches on rank 0."""
    whole, cut = build("1f1b", p, m), sliced("1f1b", p, m, k)
    before, after = simulate(lower(whole), Costs(f=k, b=2 * k)), simulate(lower(cut), Costs(f=1, b=2))
    assert before.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert after.bubble == pytest.approx((p - 1) / (m * k + p - 1))
    assert most_in_flight(cut)[0] / k == (p + k - 1) / k < most_in_flight(whole)[0]


def test_a_slice_out_of_order_is_told():
    schedule = sliced("gpipe", 2, 2, 2)
    row = list(schedule.rows[1])
    row[0], row[1] = row[1], row[0]
    with pytest.raises(CheckError, match="1F1 needs 1F0, which is not done before it"):
        check(replace(schedule, rows=(schedule.rows[0], tuple(row))))
    row = list(schedule.rows[1])
    at = row.index(Action(1, Op.B, 1))
    row[at], row[at + 1] = row[at + 1], row[at]
    with pytest.raises(CheckError, match="1B0 needs 1I1, which is not done before it"):
        check(replace(schedule, rows=(schedule.rows[0], tuple(row))))


@pytest.mark.parametrize(
    ("schedule", "slices", "told"),
    [
        (build("pipedream", 2, 2), 2, "not the compute actions of one synchronous step"),
        (lower(build("1f1b", 2, 4)), 2, "not the compute actions of one synchronous step"),
        (build("1f1b", 2, 3), 2, "3 forwards of a stage, which are not microbatches of 2 slices"),
        (sliced("1f1b", 2, 1, 2), 4, "has microbatches of 2 slices already: take 2"),
    ],
)
def test_what_can_not_be_cut_is_refused(schedule, slices, told):
    with pytest.raises(ScheduleError, match=told):
        with_slices(schedule, slices)
