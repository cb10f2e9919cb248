"""Offload of activations: every rank's device keeps to its bound, and the rows with moves are proved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.schedules import CheckError, Schedule, ScheduleError, build, check, lower, simulate
from raypar.schedules.action import Op
from raypar.schedules.catalog import CATALOG
from raypar.schedules.passes.offload_activations import offload_activations
from raypar.schedules.rules import most_in_flight
from raypar.schedules.simulation.simulate import Costs

SYNCHRONOUS = [name for name, entry in CATALOG.items() if not (entry.forward_only or entry.is_stream)]


def lowered(name, ranks=3, microbatches=6):
    return lower(build(name, ranks, microbatches))


def count(schedule, op):
    return sum(action.op is op for row in schedule.rows for action in row)


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("most", [2, 3])
def test_every_synchronous_schedule_keeps_to_its_bound(name, most):
    schedule = lowered(name)
    try:
        moved = offload_activations(schedule, most)
    except ScheduleError as error:
        enough = int(str(error).split("allow ")[1].split(",")[0])
        assert enough > most
        most, moved = enough, offload_activations(schedule, enough)
        with pytest.raises(ScheduleError):
            offload_activations(schedule, enough - 1)
    check(moved, send_capacity=8)
    assert max(most_in_flight(moved)) <= most < max(most_in_flight(schedule)) or moved == schedule
    assert count(moved, Op.OFFLOAD) == count(moved, Op.RELOAD)
    plain = tuple(tuple(one for one in row if one.op not in (Op.OFFLOAD, Op.RELOAD)) for row in moved.rows)
    assert plain == schedule.rows
    assert offload_activations(moved, most) is moved


@given(st.sampled_from(SYNCHRONOUS), st.integers(1, 4), st.integers(1, 6), st.integers(1, 8))
def test_any_sizes(name, ranks, microbatches, most):
    try:
        schedule = lowered(name, ranks, microbatches)
        moved = offload_activations(schedule, most)
    except ScheduleError:
        return
    check(moved, send_capacity=8)
    assert max(most_in_flight(moved)) <= most
    assert simulate(moved, Costs()).makespan == simulate(schedule, Costs()).makespan, "moves that cost nothing"


def test_gpipe_holds_two_of_all_and_moves_the_others_once():
    moved = offload_activations(lower(build("gpipe", 2, 5)), 2)
    assert most_in_flight(moved) == (2, 2)
    assert [str(one) for one in moved.rows[0] if one.op in (Op.OFFLOAD, Op.RELOAD)] == [
        *(f"0OFFLOAD{mb}" for mb in (1, 2, 3)),
        *(f"0RELOAD{mb}" for mb in (1, 2, 3)),
    ]


def test_moves_take_the_time_that_they_cost_and_hide_beside_computing():
    moved = offload_activations(lower(build("gpipe", 2, 8)), 4)
    free = simulate(moved, Costs(b=2.0)).makespan
    beside, between = (simulate(moved, Costs(b=2.0, offload=0.5, offload_beside=one)).makespan for one in (True, False))
    assert free < beside < between


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("0F0 0OFFLOAD0 0B0 STEP", "put 0RELOAD0 before it"),
        ("0F0 0B0 0OFFLOAD0 STEP", "after the backward"),
        ("0F0 0RELOAD0 0B0 STEP", "0OFFLOAD0"),
        ("0OFFLOAD0 0F0 0RELOAD0 0B0 STEP", "0F0"),
    ],
)
def test_moves_that_make_no_sense_are_told(rows, told):
    schedule = Schedule.of("mine", [[*rows.split()]])
    with pytest.raises(CheckError) as error:
        check(schedule)
    assert told in str(error.value)


@pytest.mark.parametrize("name", ["pipedream", "forward-only"])
def test_what_is_no_synchronous_step_is_refused(name):
    names = [one for one in CATALOG if one == name or CATALOG[one].is_stream or CATALOG[one].forward_only]
    with pytest.raises(ScheduleError, match="leave their bound out"):
        offload_activations(build(names[0], 2, 4), 1)
