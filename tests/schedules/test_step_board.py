"""A step on paper, taken by hand: what is ready, why something is not, and schedules that take over."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.schedules.action import COMPUTE, STEP, Action, Op
from raypar.schedules.catalog import build
from raypar.schedules.passes.gather_weights import gather_weights
from raypar.schedules.passes.lower import lower
from raypar.schedules.passes.reduce_gradients import reduce_gradients
from raypar.schedules.passes.skip_connections import with_skips
from raypar.schedules.rules import needs, provides, stage_needs
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.step_board import Board, MoveError, maker_of, moves
from tests.support.schedules import gathered, lowered_schedules, spelled


def board(name="gpipe", ranks=2, microbatches=3):
    return Board(lower(build(name, ranks, microbatches)))


@given(schedule=lowered_schedules(), seed=st.integers(0, 2**32 - 1))
def test_whatever_is_ready_can_be_taken_and_the_step_comes_to_its_end(schedule, seed):
    played, draw, there, taken = Board(schedule), random.Random(seed), set(), set()
    in_rows = {one: wanted for row in schedule.rows for one, wanted in stage_needs(row).items()}
    while played.left:
        ready = played.ready()
        assert played.left[0] in ready, "the schedule's own next move is always one"
        for move in played.left:
            mine = {value for action in move.names for value in provides(action)}
            met = all(need in there | mine for action in move.names for need in needs(action, schedule))
            met = met and taken.issuperset(in_rows.get((move.head, move.before), ()))
            waits = move.head == STEP and len(played.left) > 1
            assert (move in ready) == (met and not waits)
        one = draw.choice(played.left)
        assert set(played.why(one.head).causes) <= {move.head for move in ready}
        move = played.demand_ready(draw.choice(ready).head)
        played.take(move)
        taken |= {(action, move.before) for action in move.names}
        there |= {value for action in move.names for value in provides(action)}
    in_all = (str(action) for row in schedule.rows for action in row if action != STEP)
    assert sorted(map(str, played.done)) == sorted([*in_all, "STEP"])


def test_a_repeated_action_is_told_apart_by_its_place():
    played = Board(lower(gather_weights(reduce_gradients(build("gpipe", 1, 2), "microbatch"), "microbatch")))
    row = "0UNSHARD 0F0 0RESHARD 0UNSHARD 0F1 0RESHARD 0UNSHARD 0B0 0RESHARD 0UNSHARD 0REDUCE_GRAD 0B1 0RESHARD"
    assert spelled(played.schedule) == [f"{row} 0REDUCE_GRAD STEP"]
    assert [str(move) for move in played.ready()] == ["0UNSHARD"]
    assert repr(played.why("0F1")).splitlines() == [
        "0F1 waits for 0UNSHARD",
        "  which waits for 0RESHARD",
        "    which waits for 0F0",
        '      which waits for 0UNSHARD, which is ready: do("0UNSHARD")',
    ]
    for name in row.split():
        assert str(played.left[0]) == name
        played.take(played.demand_ready(name))
    assert [played.why(name).status for name in ("0UNSHARD", "0REDUCE_GRAD")] == ["done", "ready"]
    with pytest.raises(MoveError, match="0UNSHARD is done"):
        played.find("0UNSHARD")
    assert played.done.count(Action.parse("0UNSHARD")) == 4


@given(data=st.data(), schedule=lowered_schedules(), at=st.integers(0, 60))
def test_what_a_step_has_gathered_and_reduced_is_known_to_a_schedule_that_takes_over(data, schedule, at):
    whole = [[action for action in row if action.op in COMPUTE] for row in schedule.rows]
    ops = {action.op for row in schedule.rows for action in row}
    other = lower(with_skips(Schedule.of("other", whole), schedule.skips), reduce_grad=Op.REDUCE_GRAD in ops)
    if Op.UNSHARD in ops:
        other = gathered(data.draw, other)
    played = Board(schedule)
    for move in played.left[:at]:
        played.take(move)
    played.swap(other)  # which checks it
    while played.left:
        played.take(played.left[0])


def test_why_goes_back_to_the_cause():
    played = board()
    assert repr(played.why("0B0")).splitlines() == [
        '0B0 waits for 0F0, which is ready: do("0F0")',
        "0B0 waits for 1SEND_B0 + 0RECV_B0",
        "  which waits for 1B0",
        "    which waits for 1F0",
        "      which waits for 0SEND_F0 + 1RECV_F0",
        '        which waits for 0F0, which is ready: do("0F0")',
    ]
    assert played.why("0F2").status == "ready"
    assert played.why("1RECV_F0").asked == Action.parse("1RECV_F0")
    assert "and for 10 moves more" in repr(played.why("STEP"))
    assert "and 14 moves more" in played.why("STEP").brief


@pytest.mark.parametrize("other", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize("at", [0, 3, 8, 18])
def test_a_swapped_schedule_orders_what_is_left(other, at):
    played = board("gpipe")
    for _ in range(at):
        played.take(played.left[0])
    done, left = played.done, played.left
    played.swap(lower(build(other, 2, 3)))
    assert played.done == done
    assert set(played.left) == set(left)
    names = [action for move in moves(played.schedule) for action in move.names]
    assert [name for name in names if name not in done] == [name for move in played.left for name in move.names]
    assert other in played.schedule.name


def test_half_a_backward_is_done_when_a_schedule_is_swapped_in():
    halves = lower(Schedule.of("halves", ["0F0 0F1 0B0 0B1", "1F0 1F1 1I0 1I1 1W0 1W1"]))
    played = Board(halves)
    for name in ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "1F0", "1F1", "1I0"]:
        played.take(played.demand_ready(name))
    played.swap(lower(build("gpipe", 2, 2)))
    assert " ".join(map(str, played.schedule.rows[1][-5:])) == "1W0 1SEND_B0 1B1 1SEND_B1 STEP"
    played.swap(halves)
    assert played.schedule.rows[1][-1] == STEP
    while played.left:
        played.take(played.left[0])


def test_halves_of_a_whole_backward_and_the_whole_of_a_split_one_are_told_apart():
    played = Board(lower(Schedule.of("halves", ["0F0 0B0", "1F0 1I0 1W0"])))
    with pytest.raises(MoveError, match="no action 1B0: this backward is split, take 1I0 and then 1W0"):
        played.demand_ready("1B0")
    for half in ("0I0", "0W0"):
        with pytest.raises(MoveError, match=f"no action {half}: this backward is whole, take 0B0"):
            played.why(half)
    names = {name for move in played.left for name in move.names}
    made = {str(maker_of(Action.parse(name), names)) for name in ("1SEND_B0", "0SEND_F0", "0RECV_B0", "1W0")}
    assert made == {"1I0", "0F0", "0RECV_B0", "1W0"}
    whole = {Action.parse("1B0")}
    assert maker_of(Action.parse("1SEND_B0"), whole) in whole


def test_names_of_swapped_schedules_do_not_pile_up():
    played = board()
    played.take(played.left[0])
    for other in ("1f1b", "gpipe", "naive"):
        played.swap(lower(build(other, 2, 3)))
    assert played.schedule.name == "gpipe then naive"


def test_what_can_not_take_over_is_refused_with_all_faults():
    played = board()
    with pytest.raises(ScheduleError, match="3 ranks, the step has 2; it has 3 stages, the step has 2; it has 4 micro"):
        played.swap(lower(build("gpipe", 3, 4)))
    with pytest.raises(MoveError, match="no action 5F0"):
        played.find("5F0")


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("F0", "F needs a stage number in front: did you mean 0F0, 1F0?"),
        ("f2", "not an action: .*did you mean 0F2, 1F2?"),
        ("0F", "F needs a microbatch number after it: did you mean 0F0, 0F1, 0F2?"),
        (" 1 f 0 ", "did you mean 1F0?"),
        ("REDUCE_GRAD", "did you mean 1REDUCE_GRAD, 0REDUCE_GRAD?"),
        ("step", "did you mean STEP?"),
        ("0SEND_F", "did you mean 0SEND_F0, 0SEND_F1, 0SEND_F2?"),
        ("", "did you mean STEP?"),
    ],
)
def test_a_half_right_name_is_answered_with_what_would_work(said, meant):
    played = Board(lower(build("gpipe", 2, 3), reduce_grad=True))
    with pytest.raises(MoveError, match=meant.replace("?", r"\?") if said else "not an action"):
        played.why(said)


def test_what_is_out_of_order_is_refused_in_few_lines():
    played = Board(lower(gather_weights(reduce_gradients(build("1f1b", 2, 4), "microbatch"), "microbatch")))
    with pytest.raises(MoveError) as refused:
        played.demand_ready("0B3")
    assert str(refused.value).splitlines() == [
        "0B3 waits for 0F3, 1SEND_B3 + 0RECV_B3, 0UNSHARD, 0REDUCE_GRAD",
        'next: do("0UNSHARD") or do("1UNSHARD"); run_to("0B3") takes it and all before it; '
        'why("0B3") has the chain in between',
    ]
    asked = played.why("0B3")
    assert len(repr(asked).splitlines()) == 16 < len(asked.full.splitlines())
    assert repr(asked).splitlines()[-1].startswith('next: do("0UNSHARD") or do("1UNSHARD"); run_to("0B3")')
    with pytest.raises(MoveError, match=r"^0RECV_B0 waits|^1SEND_B0 \+ 0RECV_B0 waits"):
        played.demand_ready("0RECV_B0")
