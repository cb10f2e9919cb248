"""Replicas of pipeline ranks: every schedule with them is proved, and what is no turn of theirs is told."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from raypar.schedules import ScheduleError, build, check, lower, simulate
from raypar.schedules.action import Action, Op
from raypar.schedules.catalog import CATALOG
from raypar.schedules.checking.errors import CheckError
from raypar.schedules.passes.replicate import replicate
from raypar.schedules.reading.torch_csv import from_csv, to_csv
from raypar.schedules.rules import most_in_flight
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.simulate import Costs
from raypar.schedules.versions import staleness

WHOLE = {Op.STEP, Op.USE}


@pytest.mark.sampled
@pytest.mark.parametrize("replicas", [(2, 3, 1), (1, 3, 4), (3, 1, 1)], ids=str)
@pytest.mark.parametrize("name", [name for name in CATALOG if name != "dualpipe"])
def test_every_schedule_has_replicas(name, replicas):
    plain, several = build(name, 3, 12), build(name, 3, 12, replicas=replicas)
    assert several.num_ranks == sum(replicas)
    assert several.placement == plain.placement
    for order in ("just_in_time", "one_sweep"):
        check(lowered := lower(several, order, reduce_grad=True), send_capacity=2)
        assert from_csv(to_csv(lowered), name) == replace(lowered, name=name), "rows say it all"
    for rank, row in enumerate(plain.rows):
        for number, here in enumerate(several.rows_of(rank)):
            mine = {mb for _, op, mb, _ in several.rows[here] if op not in WHOLE}
            assert mine == set(range(number, plain.num_microbatches, replicas[rank]))
            assert all(mine == set(several.microbatches_of(here, stage)) for stage in several.stages_of(here))
            if name != "1f1b":
                kept = [one for one in row if one.op in WHOLE or one.microbatch in mine]
                assert list(several.rows[here]) == kept, "the row, without what others do"
    assert staleness(several) == staleness(plain)


@pytest.mark.parametrize("replicas", [(2, 1), (3, 1), (4, 2), (2, 3, 1)])
def test_1f1b_warms_all_replicas_up(replicas):
    p, m = len(replicas), 24
    made = build("1f1b", p, m, replicas=replicas)
    held = [-(-sum(replicas[rank:]) // count) for rank, count in enumerate(replicas) for _ in range(count)]
    assert list(most_in_flight(made)) == held, "PipeDream's numbers of warm-up"
    if p > 2:
        return
    costs = Costs(of_stage={(stage, op): count * t for stage, count in enumerate(replicas) for op, t in _TIMES.items()})
    divided = replicate(build("1f1b", p, m), replicas)
    spans = [simulate(lower(one), costs).makespan for one in (made, divided)]
    assert spans[0] < 0.85 * spans[1], "a row that is divided has too few forwards under way"
    assert spans[0] < 1.25 * m * 3, "every rank is busy but for the ends: a microbatch takes F + B = 3 of each"


_TIMES = {Op.F: 1.0, Op.B: 2.0}


def test_replicas_that_do_not_divide_a_step_are_told():
    with pytest.raises(
        CheckError, match=re.escape("3 replicas of rank 1 do not divide the 8 microbatches of a step")
    ) as raised:
        check(lower(build("gpipe", 3, 8, replicas=(2, 3, 1))))
    assert "take a multiple of 6 microbatches, or 1 replica" in str(raised.value)
    assert [fault.rule for fault in raised.value.faults] == ["replicas"]


@pytest.mark.parametrize(
    ("replicas", "says"),
    [((2, 1), "2-1: give a number of one or more for each of 3 ranks"), ((2, 0, 1), "2-0-1: give a number of one or")],
)
def test_wrong_numbers_are_told(replicas, says):
    with pytest.raises(ScheduleError, match=says):
        replicate(build("gpipe", 3, 4), replicas)
    with pytest.raises(ScheduleError, match="start from its compute actions"):
        replicate(lower(build("gpipe", 3, 4)), (1, 2, 1))


ROWS = ["0F0 0B0", "0F1 0B1"]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["0F0 0B0", "0F0 0B0"], "in its turn|its microbatches in turn: 0F0 belongs on rank 0"),
        (["0F0 0B0 1F0 1B0", "0F1 0B1"], "stage 1 is on rank 0 only, whose other stages are on more"),
        (["0F0 0B0", "1F0 1B0 1F1 1B1", "0F1 0B1"], "stage 0 is on rank 0 and on rank 2"),
    ],
)
def test_rows_that_are_no_replicas_are_told(rows, says):
    assert Schedule.of("mine", ROWS).replicas == (2,)
    with pytest.raises(ScheduleError, match=says):
        Schedule.of("mine", rows)


def test_what_replicas_do_together_comes_in_one_order():
    sound = lower(build("interleaved", 2, 4, replicas=(2, 1)), reduce_grad=True)
    first, second, other = map(list, sound.rows)
    turned = [action for action in second if action.op is not Op.REDUCE_GRAD]
    turned[-1:-1] = [Action(0, Op.REDUCE_GRAD, None), Action(2, Op.REDUCE_GRAD, None)]
    with pytest.raises(CheckError, match=r"0REDUCE_GRAD, where rank 0.0 has 2REDUCE_GRAD: replicas meet in one order"):
        check(replace(sound, rows=(tuple(first), tuple(turned), tuple(other))))
    once_more = [*second[:-1], Action(0, Op.UNSHARD, None), Action(0, Op.RESHARD, None), second[-1]]
    with pytest.raises(CheckError, match="replicas"):
        check(replace(sound, rows=(tuple(first), tuple(once_more), tuple(other))))
    moved = [*second, next(action for action in first if action.op is Op.F)]
    with pytest.raises(CheckError, match=r"0F0 is of another replica's turn: put it on rank 0.0"):
        check(replace(sound, rows=(tuple(first), tuple(moved), tuple(other))))


def test_rows_are_named_by_rank_and_replica():
    schedule = build("1f1b", 3, 6, replicas=(2, 3, 1))
    names = [line.split("F")[0].strip() for line in repr(schedule).splitlines()[:-1]]
    assert names == ["rank 0.0", "rank 0.1", "rank 1.0", "rank 1.1", "rank 1.2", "rank 2"]
    assert simulate(schedule).events[0].actor == "pp=0.0"


def test_one_action_out_of_turn_is_the_one_that_is_told():
    rows = [[str(action) for action in row] for row in build("dualpipe", 2, 4).rows]
    rows[0][rows[0].index("0F0")] = "0F1"
    with pytest.raises(ScheduleError, match="0F1 belongs on rank 1"):
        Schedule.of("mine", rows)
