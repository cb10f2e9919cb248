"""Smallest counterexamples: what is shown beside the fault of a large schedule, and that the fault is never hidden."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.schedules import CheckError, Schedule, build, check, gather_weights, lower, reduce_gradients
from raypar.schedules.action import Action, Op
from raypar.schedules.checking import counterexample as shrink
from raypar.schedules.checking.counterexample import demand_sound, part_of


@pytest.fixture
def timeless(monkeypatch):
    """However busy the machine is."""
    monkeypatch.setattr(shrink, "MOST_SECONDS", 60)


def error_of(schedule, generate=None, **options):
    with pytest.raises(CheckError) as raised:
        demand_sound(schedule, generate, **options)
    with pytest.raises(CheckError) as plain:
        check(schedule, **options)
    assert raised.value.faults == plain.value.faults
    assert str(raised.value).startswith(str(plain.value))
    return str(raised.value).removeprefix(str(plain.value)).strip().splitlines()


def changed(schedule, rank, change):
    rows = [list(row) for row in schedule.rows]
    change(rows[rank])
    return replace(schedule, rows=tuple(map(tuple, rows)))


def late(ranks, microbatches, chunks=1):
    """The last rank waits for its third forward before its first backward is sent: wrong from 2 ranks on, 3 of them."""
    rows = [list(row) for row in build("1f1b", ranks, microbatches).rows]
    if ranks > 1 and microbatches > 2:
        rows[-1] = sorted(rows[-1], key=lambda action: (action.op is Op.B, action.microbatch))
        rows[0] = sorted(rows[0], key=lambda action: (action.microbatch > 1, action.op is Op.B))
    return lower(Schedule.of("late", rows))


def test_what_is_sound_is_let_pass():
    demand_sound(late(2, 2))
    demand_sound(lower(build("1f1b", 4, 8)), max_in_flight=4)


def test_the_smallest_sizes_that_fail_are_shown(timeless):
    assert error_of(late(4, 8), late) == [
        "It also fails with 2 ranks and 3 microbatches, the smallest:",
        *check_text(late(2, 3)),
    ]


def check_text(schedule, **options):
    with pytest.raises(CheckError) as raised:
        check(schedule, **options)
    return raised.value.picture.splitlines()


def test_fewest_ranks_come_first_and_chunks_are_named(timeless):
    def generate(ranks, microbatches, chunks):
        schedule = build("interleaved", ranks, microbatches, chunks)  # which raises for one chunk
        return changed(schedule, 0, list.reverse) if chunks > 2 or ranks > 1 else schedule

    assert (
        error_of(generate(2, 4, 3), generate)[0]
        == "It also fails with 1 rank, 1 microbatch and 3 chunks, the smallest:"
    )
    assert (
        error_of(generate(4, 4, 2), generate)[0]
        == "It also fails with 2 ranks, 1 microbatch and 2 chunks, the smallest:"
    )


def test_only_the_same_rule_counts(timeless):
    def generate(ranks, microbatches, chunks):
        schedule = build("gpipe", ranks, microbatches)
        return changed(schedule, 0, list.reverse if microbatches > 4 else list.pop)  # incomplete below 5

    assert error_of(generate(3, 6, 1), generate)[0] == "It also fails with 1 rank and 5 microbatches, the smallest:"


def test_nothing_is_added_to_what_is_the_smallest_itself():
    assert error_of(changed(build("gpipe", 1, 1), 0, list.reverse)) == []


def test_a_generator_that_fails_hides_nothing(timeless):
    def generate(ranks, microbatches, chunks):
        raise ZeroDivisionError

    assert error_of(changed(build("gpipe", 1, 1), 0, list.reverse), generate) == []

    assert (
        error_of(late(4, 8), generate)[0]
        == "The same fault is in a part of it, microbatches 0 and 2 on ranks 0 to 1, counted from 0 here:"
    )


def test_tries_are_bounded(timeless):
    calls = []

    def generate(ranks, microbatches, chunks):
        calls.append(ranks)
        return build("1f1b", ranks, microbatches)

    lines = error_of(changed(build("1f1b", 40, 60), 3, list.reverse), generate)
    assert lines[0].startswith("The same fault is in a part of it, microbatch ")  # the rows have tries of their own
    assert len(calls) == shrink.MOST_TRIES


def test_rows_keep_what_the_fault_needs(timeless):
    def swap(row):
        row[51], row[52] = row[52], row[51]

    assert error_of(changed(lower(build("1f1b", 8, 32)), 3, swap)) == [
        "The same fault is in a part of it, microbatch 6 on ranks 3 to 4, counted from 0 here:",
        "rank 0:   0F0       0SEND_F0 >0B0<      0RECV_B0  STEP",
        "rank 1:   1RECV_F0  1F0       1B0       1SEND_B0  STEP",
        "order: rank 0, action 2: 0B0 needs 0RECV_B0, which is not done before it",
    ]


def test_a_deadlock_shows_its_circle_and_no_other_ranks(timeless):
    lines = error_of(lower(build("1f1b", 8, 32)), send_capacity=0)
    assert lines[0] == "The same fault is in a part of it, microbatches 0 and 1 on ranks 6 to 7, counted from 0 here:"
    with pytest.raises(CheckError) as raised:
        check(lower(build("1f1b", 8, 32)), send_capacity=0)
    shown = [line.split(":")[0] for line in str(raised.value).splitlines()[1:-2]]
    assert shown == ["rank 6", "rank 7"]
    assert "(ranks 6 to 7 of 8, actions" in str(raised.value)


def test_a_wait_for_room_keeps_as_many_microbatches_as_there_is_room(timeless):
    forwards = [[f"0F{mb}" for mb in range(40)], [f"{stage}F{mb}" for mb in range(40) for stage in (1, 2)]]
    rows = [[*forwards[0], *(f"3F{mb}" for mb in range(40))], forwards[1]]
    schedule = lower(Schedule.of("both ways", [[Action.parse(word) for word in row] for row in rows]))
    lines = error_of(schedule, send_capacity=1)
    assert lines[0] == "The same fault is in a part of it, microbatches 0, 1, 2 and 3, counted from 0 here:"


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["one swap", "all reversed", "room"])
def test_a_large_schedule_takes_about_a_second(kind):
    schedule = lower(build("gpipe" if kind == "room" else "1f1b", 64, 256))
    row = schedule.rows[32]
    if kind == "one swap":
        row = (*row[:400], row[401], row[400], *row[402:])
    elif kind == "all reversed":
        row = row[::-1]
    schedule = replace(schedule, rows=(*schedule.rows[:32], row, *schedule.rows[33:]))
    start = time.process_time()
    with pytest.raises(CheckError):
        demand_sound(schedule, send_capacity=0 if kind == "room" else 8, max_in_flight=200 if kind == "room" else None)
    assert time.process_time() - start < 4  # on a busy machine; 0.3 s on a quiet one


@given(
    st.integers(1, 4), st.integers(1, 5), st.sampled_from(["gpipe", "1f1b", "interleaved"]), st.booleans(), st.data()
)
def test_a_part_of_a_sound_schedule_is_sound(ranks, microbatches, name, lowered, data):
    schedule = build(name, ranks, microbatches * ranks if name == "interleaved" else microbatches)
    schedule = lower(schedule, reduce_grad=True) if lowered else schedule
    first = data.draw(st.integers(0, ranks - 1))
    last = data.draw(st.integers(first + 1, ranks))
    kept = sorted(data.draw(st.sets(st.integers(0, schedule.num_microbatches - 1), min_size=1)))
    part = part_of(schedule, (first, last), kept)
    if part is None:
        assert name == "interleaved"
    else:
        assert (part.num_ranks, part.num_microbatches) == (last - first, len(kept))
        check(part)


def test_a_small_example_leaves_out_the_gathers_and_reductions_of_what_it_leaves_out(timeless):
    def swap(row):
        one, other = (row.index(Action.parse(name)) for name in ("3RECV_F7", "3F7"))
        row[one], row[other] = row[other], row[one]

    rows = lower(gather_weights(reduce_gradients(build("1f1b", 4, 16), "microbatch"), "microbatch"))
    lines = error_of(changed(rows, 3, swap))
    assert lines[0] == "The same fault is in a part of it, microbatch 7 on ranks 2 to 3, counted from 0 here:"
    assert lines[2].startswith(
        "rank 1:   1UNSHARD >1F0<      1RECV_F0  1RESHARD  1UNSHARD  1B0       1SEND_B0  1RESHARD"
    )
    assert lines[-1] == "order: rank 1, action 1: 1F0 needs 1RECV_F0, which is not done before it"
