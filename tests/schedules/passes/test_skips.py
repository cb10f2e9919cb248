"""Skip connections: rows say where they go, and every schedule of the catalog takes them."""

from __future__ import annotations

import pytest

from raypar.schedules import CheckError, Costs, Schedule, ScheduleError, build, check, lower, simulate, text
from raypar.schedules.action import COMPUTE, Action, Op
from raypar.schedules.catalog import CATALOG
from raypar.schedules.passes.replicate import replicate
from raypar.schedules.passes.skip_connections import with_skips
from raypar.schedules.reading.torch_csv import from_csv, to_csv
from tests.support.event_check import unsound
from tests.support.schedules import spelled


def skipping(name, ranks, microbatches, *skips, **sizes):
    return with_skips(build(name, ranks, microbatches, **sizes), skips)


def test_a_skip_goes_straight_to_its_stage_and_its_gradient_straight_back():
    lowered = lower(skipping("1f1b", 3, 1, (0, 2)))
    assert spelled(lowered) == [
        "0F0 0SEND_F0 0SEND_F0@2 0RECV_B0 0RECV_B0@2 0B0 STEP",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 STEP",
        "2RECV_F0 2RECV_F0@0 2F0 2B0 2SEND_B0 2SEND_B0@0 STEP",
    ]
    check(lowered)
    assert unsound(lowered) is None


def test_stages_of_one_rank_send_nothing():
    lowered = lower(skipping("zb-v", 2, 3, (0, 3), (1, 2)))
    check(lowered)
    assert not [action for row in lowered.rows for action in row if action.peer is not None]


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name, entry in CATALOG.items() if not entry.forward_only])
@pytest.mark.parametrize("size", [(2, 3), (3, 7), (4, 8)])
def test_every_schedule_of_the_catalog_takes_them(name, size):
    schedule = build(name, size[0], size[1] * CATALOG[name].sizes.multiple)
    last = schedule.num_stages - 1
    for skips in [(0, last)], [(0, 1), (0, last)], [(one, last - one) for one in range(schedule.num_stages // 2)]:
        skipping = with_skips(schedule, list(dict.fromkeys(skips)))
        lowered = lower(skipping, reduce_grad=True) if not schedule.stream else lower(skipping)
        check(lowered, send_capacity=8)
        assert unsound(lowered, 8) is None
        assert unsound(lower(skipping, "one_sweep"), 0) is None
        assert Schedule.of("read", lowered.rows).rows == from_csv(to_csv(lowered), "read").rows == lowered.rows


def test_a_skip_is_received_when_its_rank_first_computes_behind_its_source():
    assert spelled(lower(skipping("looped-bfs", 2, 1, (0, 3))))[1].startswith(
        "1RECV_F0 3RECV_F0@0 1F0 1SEND_F0 3RECV_F0 3F0"
    )


def test_where_more_skips_are_under_way_than_a_peer_takes_the_check_tells():
    with pytest.raises(CheckError, match="rank 0 at 0SEND_F13@7 waits for rank 3 to receive an earlier value"):
        check(lower(skipping("looped-bfs", 4, 16, (0, 7), (1, 6), (2, 5), (3, 4))), send_capacity=8)


def test_they_take_part_in_replicas():
    lowered = lower(with_skips(replicate(build("1f1b", 3, 6), (2, 3, 1)), [(0, 2)]))
    check(lowered, send_capacity=8)
    assert "0SEND_F1@2" in spelled(lowered)[1]


def test_a_link_of_a_skip_takes_as_long_as_one_link():
    costs = Costs(f=1, b=1, link=10)
    plain, short = build("gpipe", 4, 1), skipping("gpipe", 4, 1, (0, 3))
    for one in plain, short, lower(plain), lower(short):
        assert simulate(one, costs).makespan == 8 + 6 * 10


def test_a_skip_that_nobody_sends_or_receives_is_told():
    lowered = lower(skipping("1f1b", 3, 2, (0, 2)))
    for gone in "0SEND_F1@2", "2RECV_F1@0", "2SEND_B1@0", "0RECV_B1@2":
        rows = [[action for action in row if str(action) != gone] for row in lowered.rows]
        with pytest.raises(CheckError) as told:
            check(with_skips(Schedule.of("cut", rows), [(0, 2)]))
        action = Action.parse(gone)
        end = "to" if "SEND" in gone else "from"
        assert f"stage {action.stage} has no {action.op} {end} {action.peer} of microbatch 1" in str(told.value)
    with pytest.raises(CheckError, match="0SEND_F0@2 has no counterpart: nothing crosses to another rank there"):
        check(with_skips(lowered, []))


@pytest.mark.parametrize(
    ("skips", "says"),
    [
        ([(2, 0)], "skip 2-0 is not from an earlier stage to a later one of 3: correct it"),
        ([(0, 3)], "skip 0-3 is not from an earlier stage to a later one of 3: correct it"),
        ([(0, 2), (0, 2)], "skip 0-2 is given twice: leave one out"),
    ],
)
def test_wrong_pairs_are_told(skips, says):
    with pytest.raises(ScheduleError, match=says):
        with_skips(build("1f1b", 3, 2), skips)


def test_an_action_that_is_no_message_has_no_other_stage():
    with pytest.raises(ValueError, match="'0F1@2': F takes no stage after @"):
        Action.parse("0F1@2")


def test_a_drawing_names_them():
    drawn = text(lower(skipping("1f1b", 3, 2, (0, 2))))
    assert drawn.endswith(", skips 0-2")
    assert "F0" in drawn
    assert all(str(op) not in drawn for op in Op if op not in COMPUTE and op.value.startswith(("SEND", "RECV")))
