"""The check refuses what is wrong: every mutant of a right schedule, and says what, where and by which rule."""

import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from raypar.schedules import CATALOG, CheckError, Schedule, ScheduleError, build, check, lower, names
from raypar.schedules.action import COMPUTE, RECVS, STEP, Action, Op
from raypar.schedules.rules import needs, partner, provides, rank_of
from raypar.schedules.schedule import MOST_SHOWN


@st.composite
def right_schedules(draw, lowered=None, min_ranks=1):
    name = draw(st.sampled_from([name for name in names() if not CATALOG[name].is_stream]))
    ranks = draw(st.integers(min_ranks, 4))
    schedule = build(name, ranks, draw(st.integers(1, 5)) * CATALOG[name].sizes.multiple)
    if draw(st.booleans()) if lowered is None else lowered:
        schedule = lower(
            schedule, draw(st.sampled_from(["just_in_time", "one_sweep"])), reduce_grad=draw(st.booleans())
        )
    check(schedule)
    return schedule


def with_rows(schedule, rows):
    return replace(schedule, rows=tuple(map(tuple, rows)))


def draw_place(data, schedule, wanted=lambda action: True):
    places = [(r, i) for r, row in enumerate(schedule.rows) for i, action in enumerate(row) if wanted(action)]
    assume(places)
    return data.draw(st.sampled_from(places))


def drop(data, schedule):
    rank, index = draw_place(data, schedule)
    # Without its only REDUCE_GRAD a schedule of one stage is that of a run without data parallelism.
    assume(schedule.num_stages > 1 or schedule.rows[rank][index].op is not Op.REDUCE_GRAD)
    rows = [list(row) for row in schedule.rows]
    del rows[rank][index]
    return with_rows(schedule, rows)


def duplicate(data, schedule):
    rank, index = draw_place(data, schedule, lambda action: action.op is not Op.REDUCE_GRAD)  # two may share a stage
    rows = [list(row) for row in schedule.rows]
    rows[rank].insert(data.draw(st.integers(0, len(rows[rank]))), rows[rank][index])
    return with_rows(schedule, rows)


def swap_dependent(data, schedule):
    pairs = []
    for rank, row in enumerate(schedule.rows):
        for later, action in enumerate(row):
            wanted = set(needs(action, schedule))
            pairs += [(rank, i, later) for i in range(later) if wanted & set(provides(row[i]))]
    assume(pairs)
    rank, i, j = data.draw(st.sampled_from(pairs))
    rows = [list(row) for row in schedule.rows]
    rows[rank][i], rows[rank][j] = rows[rank][j], rows[rank][i]
    return with_rows(schedule, rows)


def move_to_another_rank(data, schedule):
    assume(schedule.num_ranks > 1)
    rank, index = draw_place(data, schedule)
    rows = [list(row) for row in schedule.rows]
    other = data.draw(st.sampled_from([r for r in range(schedule.num_ranks) if r != rank]))
    action = rows[rank].pop(index)
    rows[other].insert(data.draw(st.integers(0, len(rows[other]))), action)
    return with_rows(schedule, rows)


def change_microbatch(data, schedule):
    rank, index = draw_place(data, schedule, lambda action: action.microbatch is not None)
    rows = [list(row) for row in schedule.rows]
    action = rows[rank][index]
    other = data.draw(st.integers(0, schedule.num_microbatches + 2).filter(lambda mb: mb != action.microbatch))
    rows[rank][index] = action._replace(microbatch=other)
    return with_rows(schedule, rows)


def change_stage(data, schedule):
    rank, index = draw_place(data, schedule, lambda action: action.stage is not None)
    rows = [list(row) for row in schedule.rows]
    action = rows[rank][index]
    other = data.draw(st.integers(0, schedule.num_stages + 1).filter(lambda stage: stage != action.stage))
    rows[rank][index] = action._replace(stage=other)
    return with_rows(schedule, rows)


def change_op(data, schedule):
    rank, index = draw_place(data, schedule, lambda action: action.microbatch is not None)
    rows = [list(row) for row in schedule.rows]
    action = rows[rank][index]
    ops = [Op.F, Op.B, Op.I, Op.W, Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B]
    rows[rank][index] = action._replace(op=data.draw(st.sampled_from([op for op in ops if op is not action.op])))
    return with_rows(schedule, rows)


@pytest.mark.parametrize(
    "mutate",
    [drop, duplicate, swap_dependent, move_to_another_rank, change_microbatch, change_stage, change_op],
    ids=lambda mutate: mutate.__name__,
)
@given(data=st.data())
def test_every_mutant_is_refused(mutate, data):
    mutant = mutate(data, data.draw(right_schedules()))
    with pytest.raises(CheckError) as raised:
        check(mutant)
    assert raised.value.faults


@given(data=st.data())
def test_a_value_that_is_neither_sent_nor_received_is_missed(data):
    schedule = data.draw(right_schedules(lowered=True, min_ranks=2))
    rank, index = draw_place(data, schedule, lambda action: action.op in RECVS)
    recv = schedule.rows[rank][index]
    for gone in ({recv}, {partner(recv)}, {recv, partner(recv)}):
        with pytest.raises(CheckError) as raised:
            check(with_rows(schedule, ([a for a in row if a not in gone] for row in schedule.rows)))
        said = " ".join(fault.sentence for fault in raised.value.faults)
        assert all(action.op.value in said for action in gone)


@given(data=st.data())
def test_receives_in_another_order_than_the_sends_are_refused(data):
    """Everything that a rank needs is there in time, only the two RECVs of one sender have changed places."""
    schedule = data.draw(right_schedules(lowered=True, min_ranks=2))
    rows = [list(row) for row in schedule.rows]
    pairs = []
    for rank, row in enumerate(rows):
        recvs = [index for index, action in enumerate(row) if action.op in RECVS]
        pairs += [(rank, i, j) for i, j in pairwise(recvs) if same_sender(row[i], row[j], schedule)]
    assume(pairs)
    rank, i, j = data.draw(st.sampled_from(pairs))
    second = rows[rank].pop(j)
    rows[rank].insert(i, second)
    mutant = with_rows(schedule, rows)
    with pytest.raises(CheckError) as raised:
        check(mutant)
    assert {fault.rule for fault in raised.value.faults} <= {"edge order", "deadlock"}


def same_sender(one, other, schedule):
    return rank_of(partner(one), schedule) == rank_of(partner(other), schedule)


def test_the_order_of_an_edge_is_named():
    rows = [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 STEP",
        "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 STEP",
    ]
    with pytest.raises(CheckError, match="edge order: rank 1, action 0: 1RECV_F1, but rank 0 sends 0SEND_F0 before"):
        check(read(rows))


def test_a_deadlock_is_told_in_the_actions_of_the_schedule():
    with pytest.raises(CheckError, match="rank 0 at 0B0 waits for 1B0 of rank 1; rank 1 at 1F1 waits for 0F1 of rank"):
        check(read(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]))


@given(data=st.data())
def test_waiting_for_an_answer_before_asking_is_a_deadlock(data):
    schedule = data.draw(right_schedules(lowered=True, min_ranks=2).filter(lambda s: not s.forward_only))
    rank, index = draw_place(data, schedule, lambda action: action.op is Op.SEND_F)
    rows = [list(row) for row in schedule.rows]
    send = rows[rank][index]
    answer = Action(send.stage, Op.RECV_B, send.microbatch)
    rows[rank].remove(answer)
    rows[rank].insert(rows[rank].index(send), answer)
    with pytest.raises(CheckError) as raised:
        check(with_rows(schedule, rows))
    deadlocks = [fault for fault in raised.value.faults if fault.rule == "deadlock"]
    assert deadlocks
    assert f"{schedule.label(rank)} at " in deadlocks[0].sentence


def test_1f1b_lowered_just_in_time_deadlocks_if_sends_block_and_the_circle_is_named():
    schedule = lower(build("1f1b", 4, 8))
    check(schedule, send_capacity=1)
    with pytest.raises(CheckError) as raised:
        check(schedule, send_capacity=0)
    (fault,) = raised.value.faults
    assert (fault.rank, fault.index, fault.rule) == (2, 5, "deadlock")
    assert fault.sentence == (
        "rank 2 at 2SEND_F1 waits for rank 3 to reach 3RECV_F1; rank 3 at 3SEND_B0 waits for rank 2 to reach 2RECV_B0"
    )
    assert ">2SEND_F1<" in str(raised.value)
    assert ">3SEND_B0<" in str(raised.value)


def read(rows):
    return Schedule.of("mine", [[Action.parse(word) for word in row.split()] for row in rows])


def test_senders_that_wait_for_room_on_both_sides_deadlock_and_are_named():
    rows = [
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 3RECV_F0 3F0 3RECV_F1 3F1 3RECV_F2 3F2 3RECV_F3 3F3",
        " ".join(f"1RECV_F{mb} 1F{mb} 2F{mb} 2SEND_F{mb}" for mb in range(4)),
    ]
    check(read(rows))
    check(read(rows), send_capacity=2)
    with pytest.raises(CheckError) as raised:
        check(read(rows), send_capacity=1)
    assert raised.value.faults[0].sentence == (
        "rank 0 at 0SEND_F3 waits for rank 1 to receive an earlier value; "
        "rank 1 at 2SEND_F1 waits for rank 0 to receive an earlier value"
    )


def test_torchs_actions_of_whole_stages_are_accepted_where_they_belong():
    check(read(["0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD"]))
    with pytest.raises(CheckError, match="0REDUCE_GRAD comes before 1 weight gradients"):
        check(read(["0F0 0I0 0REDUCE_GRAD 0W0"]))
    check(read(["0F0 0F1 0B0 0REDUCE_GRAD 0B1 0REDUCE_GRAD"]))
    for row in ("0REDUCE_GRAD 0F0 0B0 0REDUCE_GRAD", "0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD"):
        with pytest.raises(CheckError, match=r"0REDUCE_GRAD has no weight gradient \(B or W\) of its stage to reduce"):
            check(read([row]))
    with pytest.raises(CheckError, match="stage 1 has no REDUCE_GRAD"):
        check(read(["0F0 0B0 0REDUCE_GRAD", "1F0 1B0"]))
    with pytest.raises(CheckError, match="0UNSHARD belongs on rank 0"):
        check(read(["0F0 0B0", "0UNSHARD 1F0 1B0"]))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            "0F0 0UNSHARD 0B0 0RESHARD",
            "action 0: 0F0 needs the weights of stage 0, which are sharded here: put 0UNSHARD",
        ),
        ("0UNSHARD 0F0 0RESHARD 0I0 0W0", "action 3: 0I0 needs the weights of stage 0"),
        ("0F0 0B0 0RESHARD", "action 2: 0RESHARD frees weights that are not whole: take it out, or put 0UNSHARD"),
        ("0UNSHARD 0F0 0RESHARD 0RESHARD 0UNSHARD 0B0 0RESHARD", "action 3: 0RESHARD frees weights"),
        ("0UNSHARD 0F0 0B0", "action 0: stage 0 is still whole at the end of the row: put 0RESHARD after its last F"),
        ("0UNSHARD 0F0 0B0 STEP 0RESHARD", "action 0: stage 0 is still whole at the STEP, which updates the shards"),
    ],
)
def test_weights_are_whole_where_they_are_needed_and_nowhere_else(row, says):
    with pytest.raises(CheckError) as raised:
        check(read([row]))
    assert [says in str(fault) for fault in raised.value.faults] == [True]
    assert raised.value.faults[0].rule == "weights"


def test_weights_may_be_gathered_twice_and_are_not_needed_for_their_gradients():
    check(read(["0UNSHARD 0F0 0UNSHARD 0I0 0RESHARD 0W0"]))
    with pytest.raises(CheckError, match="1F0 needs the weights of stage 1"):
        check(read(["0UNSHARD 0F0 0B0 0RESHARD", "1F0 1B0"]))


def test_step_closes_the_weight_gradients_of_its_row():
    row = "0F0 0SEND_F0 0RECV_B0 0B0 STEP"
    other = "1RECV_F0 1F0 1B0 1SEND_B0"
    with pytest.raises(CheckError, match="step: rank 1: the row has no STEP: lower"):
        check(read([row, other]))
    with pytest.raises(CheckError, match="STEP comes before 1 weight gradients"):
        check(read([row, "1RECV_F0 1F0 STEP 1B0 1SEND_B0"]))
    check(read([row, f"{other} STEP"]))
    with pytest.raises(CheckError, match="1SEND_B0 comes after the STEP"):  # rank 0 would wait for it in vain
        check(read([row, "1RECV_F0 1F0 1B0 STEP 1SEND_B0"]))
    with pytest.raises(CheckError, match="step: rank 0, action 3: 0REDUCE_GRAD comes after the STEP, which needs"):
        check(read(["0F0 0B0 STEP 0REDUCE_GRAD"]))
    with pytest.raises(CheckError, match="STEP in an evaluation"):
        check(read(["0F0 STEP"]))


def test_all_faults_of_the_rows_are_reported_together_and_few_of_them_printed():
    schedule = build("gpipe", 3, 8)
    mutant = with_rows(schedule, ([a for a in row if a != Action(1, Op.F, 2)][::-1] for row in schedule.rows))
    with pytest.raises(CheckError) as raised:
        check(mutant)
    faults = raised.value.faults
    assert {fault.rank for fault in faults} == {0, 1, 2}
    assert any(fault.index is None and "stage 1 has no F of microbatch 2" in fault.sentence for fault in faults)
    assert f"and {len(faults) - MOST_SHOWN} more" in str(raised.value)


def test_the_text_of_an_error_shows_a_window_of_a_large_schedule():
    schedule = build("1f1b", 40, 60)
    rows = [list(row) for row in schedule.rows]
    rows[20][50], rows[20][51] = rows[20][51], rows[20][50]
    del rows[20][30]
    with pytest.raises(CheckError) as raised:
        check(with_rows(schedule, rows))
    text = str(raised.value)
    assert max(map(len, text.splitlines())) < 160
    assert len(text.splitlines()) < 30


def test_a_huge_microbatch_number_costs_neither_time_nor_memory():
    huge, row = 4_000_000_000, "0F0 0B0 0F4000000000 0B4000000000 0REDUCE_GRAD"
    with pytest.raises(ScheduleError, match="microbatch 4000000000 is named, but the rows have only 2 forwards"):
        read([row])
    rows = (tuple(map(Action.parse, row.split())),)
    unread = Schedule("mine", rows, (0,), huge + 1, lowered=True, forward_only=False)
    with pytest.raises(CheckError, match="stage 0 has no F and B of microbatch 1, 2, 3"):
        check(unread)
    with pytest.raises(ScheduleError, match="stage 1 has no action on any rank"):
        read(["0F0 0B0 4000000000F0"])


@pytest.mark.parametrize("placement", [(0, 2), (0, 1, 2), (0, -1), ()])
def test_a_stage_on_a_rank_that_is_not_there_is_refused(placement):
    for schedule in (build("1f1b", 2, 2), lower(build("1f1b", 2, 2), reduce_grad=True)):
        with pytest.raises(CheckError) as raised:
            check(replace(schedule, placement=placement))
        assert "placement" in {fault.rule for fault in raised.value.faults}
    with pytest.raises(CheckError, match="has no rows"):
        check(replace(build("1f1b", 2, 2), rows=()))


def test_rows_may_be_written_as_texts():
    rows = [["0F0", (0, "B", 0)], "1F0 1B0"]
    assert Schedule.of("mine", rows) == replace(build("gpipe", 2, 1), name="mine")
    with pytest.raises(ScheduleError, match="schedule 'mine': row 1, action 1: '1X0' is not an action"):
        Schedule.of("mine", ["0F0 0B0", "1F0 1X0"])


def test_a_skip_to_a_stage_that_is_not_there_is_told():
    rows = ["0F0 0SEND_F0 0RECV_B0 0B0 STEP", "1RECV_F0@7 1F0 1B0 1SEND_B0 STEP"]
    with pytest.raises(CheckError, match=r"a skip goes from stage 1 to stage 7, and the schedule has 2 stages: name"):
        check(read(rows))


def test_a_schedule_is_refused_when_its_rows_make_none():
    with pytest.raises(ScheduleError, match="stage 0 is on rank 0 and on rank 1"):
        read(["0F1", "0F0", "0F2"])
    with pytest.raises(ScheduleError, match="nothing would be computed"):
        Schedule.of("empty", [[STEP]])
    with pytest.raises(ValueError, match="send_capacity=-1"):
        check(build("gpipe", 1, 1), send_capacity=-1)


def test_the_error_travels_between_processes():
    with pytest.raises(CheckError) as raised:
        check(lower(build("1f1b", 4, 8)), send_capacity=0)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (str(copy), copy.faults) == (str(raised.value), raised.value.faults)


@pytest.mark.long
def test_memory_grows_with_what_is_under_way_and_not_with_the_number_of_actions():
    import tracemalloc

    peaks = []
    for microbatches in (200, 1600):
        schedule = lower(build("1f1b", 4, microbatches))
        tracemalloc.start()
        check(schedule)
        peaks.append(tracemalloc.get_traced_memory()[1] / len(schedule.rows[0]))
        tracemalloc.stop()
    # One number a microbatch of one row, far from the 80 bytes of an action, let alone of all ranks' actions.
    assert peaks[1] < 60, peaks


def test_compute_actions_are_all_there_is_before_lowering():
    with pytest.raises(CheckError, match="pairing: rank 0, action 1: 0SEND_F0 has no counterpart"):
        check(replace(read(["0F0 0SEND_F0", "1RECV_F0 1F0"]), lowered=False))
    assert {action.op for row in build("1f1b", 2, 2) for action in row} <= COMPUTE
