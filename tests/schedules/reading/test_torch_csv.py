"""torch.distributed.pipelining as a second author: its rows, and its CSV files both ways."""

import pytest

from raypar.schedules import Schedule, ScheduleError, build, check, from_csv, lower, to_csv
from raypar.schedules.action import COMPUTE, STEP, Action, Op
from tests.support.thinned import thinned

theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
from tests.support.torch_schedules import make  # noqa: E402  (it needs torch)

HAS_WAITS = hasattr(theirs, "WAIT_SEND_F")  # since torch 2.15


def single(kind, ranks, microbatches):
    """The drawn order of a schedule of one stage a rank, without a process group."""
    schedule = object.__new__(kind)
    schedule._num_stages, schedule._n_microbatches = ranks, microbatches
    return schedule._get_pipeline_order()


def compute(rows):
    """Their rows, spelled, without bubbles and without what follows from lowering."""
    kinds = {op.value for op in COMPUTE}
    return [
        [str(action) for action in row if action is not None and action.computation_type.value in kinds]
        for _, row in sorted(rows.items())
    ]


def spelled(schedule):
    return [list(map(str, row)) for row in schedule]


@pytest.mark.parametrize("ranks", thinned(range(1, 9), lambda ranks: ranks <= 4))
def test_gpipe_is_torchs(ranks):
    for microbatches in range(1, 17):
        assert spelled(build("gpipe", ranks, microbatches)) == compute(
            single(theirs.ScheduleGPipe, ranks, microbatches)
        )


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", thinned(range(1, 6), lambda ranks: ranks <= 3))
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_is_torchs(ranks, chunks):
    for microbatches in (1, 2, 3, 5, 8, 10, 12):
        if microbatches % max(1, microbatches // ranks):
            continue  # torch wants rounds of one size
        rows = make(theirs.ScheduleInterleaved1F1B, ranks, microbatches, chunks).pipeline_order
        assert spelled(build("interleaved", ranks, microbatches, chunks)) == compute(rows)
        rows = make(theirs.ScheduleInterleavedZeroBubble, ranks, microbatches, chunks).pipeline_order
        assert spelled(build("zb-interleaved", ranks, microbatches, chunks)) == compute(rows)


@pytest.mark.parametrize("ranks", thinned(range(1, 6), lambda ranks: ranks <= 3))
def test_looped_breadth_first_is_torchs_but_for_the_order_of_backwards(ranks):
    """Torch goes through the microbatches of a stage backwards then, which adds up gradients in another order."""
    for microbatches in range(1, 9):
        rows = compute(make(theirs.ScheduleLoopedBFS, ranks, microbatches).pipeline_order)
        half = 2 * microbatches
        for ours, their in zip(spelled(build("looped-bfs", ranks, microbatches)), rows, strict=True):
            assert ours == [*their[:half], *their[half : half + microbatches][::-1], *their[-microbatches:][::-1]]


@pytest.mark.parametrize("ranks", thinned(range(1, 9), lambda ranks: ranks <= 4))
def test_dualpipe_v_is_torchs(ranks, tmp_path):
    for microbatches in (2 * ranks, 2 * ranks + 1, 3 * ranks + 2):  # torch demands two a rank
        their = make(theirs.ScheduleDualPipeV, ranks, microbatches)
        their._dump_csv(tmp_path / "their.csv", format="compute_only")
        ours = build("dualpipe-v", ranks, microbatches)
        assert ours.rows == from_csv((tmp_path / "their.csv").read_text(), "their").rows


@pytest.mark.parametrize("ranks", thinned(range(1, 9), lambda ranks: ranks <= 4))
def test_1f1b_is_torchs_where_torch_is_right(ranks):
    """Its last rank always starts with F1 and ends with a forward that does not exist, and with fewer microbatches
    than warm-up forwards it invents more. It demands m >= p, and no other rank is wrong then.
    """
    for microbatches in range(1, 17):
        ours, rows = (
            spelled(build("1f1b", ranks, microbatches)),
            compute(single(theirs.Schedule1F1B, ranks, microbatches)),
        )
        wrong = [rank for rank in range(ranks) if ours[rank] != rows[rank]]
        assert wrong == [rank for rank in range(ranks) if rank == ranks - 1 or ranks - 1 - rank > microbatches]
        for rank in wrong:
            assert f"{rank}F{microbatches}" in rows[rank] or f"{rank}F0" not in rows[rank]


def test_torchs_1f1b_of_2_ranks_and_3_microbatches_names_a_microbatch_that_does_not_exist():
    assert compute(single(theirs.Schedule1F1B, 2, 3))[1] == ["1F1", "1B0", "1F2", "1B1", "1F3", "1B2"]
    assert spelled(build("1f1b", 2, 3))[1] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]


KINDS = [
    (theirs.ScheduleInterleaved1F1B, 4, 8),
    (theirs.ScheduleLoopedBFS, 2, 4),
    (theirs.ScheduleInterleavedZeroBubble, 2, 4),
    (theirs.ScheduleZBVZeroBubble, 4, 8),
    (theirs.ScheduleDualPipeV, 4, 8),
]


@pytest.mark.parametrize(("kind", "ranks", "microbatches"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_we_read_what_torch_writes(kind, ranks, microbatches, form, tmp_path):
    their = make(kind, ranks, microbatches)
    their._dump_csv(tmp_path / "their.csv", format=form)
    schedule = from_csv((tmp_path / "their.csv").read_text(), "their")
    assert (schedule.num_ranks, schedule.num_microbatches) == (ranks, microbatches)
    assert schedule.lowered == (form == "compute_comms")
    check(schedule)
    whole = lower(schedule)
    assert all(row[-1] == STEP for row in whole)
    check(whole)
    assert from_csv(to_csv(schedule), "their") == schedule


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"), [("1f1b", 3, 5), ("gpipe", 2, 3), ("interleaved", 2, 4), ("naive", 2, 2)]
)
def test_torch_reads_what_we_write(name, ranks, microbatches, tmp_path):
    schedule = build(name, ranks, microbatches)
    chunks = schedule.num_stages // ranks
    path = tmp_path / "ours.csv"
    their = make(theirs._PipelineScheduleRuntime, ranks, microbatches, chunks)
    path.write_text(to_csv(schedule))
    their._load_csv(path, format="compute_only")
    assert compute(their.pipeline_order) == spelled(schedule)
    for order in ("just_in_time", "one_sweep"):
        lowered = lower(schedule, order, reduce_grad=True)
        path.write_text(to_csv(lowered, waits=HAS_WAITS))
        their._load_csv(path, format="compute_comms")
        rows = [list(map(str, row)) for _, row in sorted(their.pipeline_order_with_comms.items())]
        assert [[cell for cell in row if "WAIT" not in cell] for row in rows] == [row[:-1] for row in spelled(lowered)]
        assert from_csv(to_csv(lowered), name) == lowered


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "forward"])
@pytest.mark.parametrize("ranks", range(1, 5))
def test_files_come_back_as_they_were(name, ranks):
    schedule = build(name, ranks, 2 * ranks)
    assert from_csv(to_csv(schedule), name) == schedule
    if ranks > 1:
        for lowered in (lower(schedule), lower(schedule, "one_sweep", reduce_grad=True)):
            assert from_csv(to_csv(lowered), name) == lowered


def test_a_step_that_does_not_close_its_row_is_written():
    rows = [[Action(0, Op.F, 0), Action(0, Op.B, 0), STEP, Action(0, Op.RESHARD, None)], [STEP, STEP]]
    schedule = Schedule.of("odd", rows)
    assert to_csv(schedule) == "0F0,0B0,STEP,0RESHARD\nSTEP,STEP\n"
    assert from_csv(to_csv(schedule), "odd") == schedule


def test_bubbles_overlapped_pairs_and_a_byte_order_mark_are_read():
    text = "\ufeff0F0, ,0F1,(0F2;0B0)OVERLAP_F_B,,0B1,0B2,\n"
    assert spelled(from_csv(text, "mine")) == [["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]]


# What torch 2.15.0 dumps of ScheduleLoopedBFS on 2 ranks of 1 stage, with 2 microbatches.
OF_TORCH_2_15 = """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0WAIT_SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,\
0RESHARD
1UNSHARD,1RECV_F0,1F0,1RECV_F1,1F1,1B1,1SEND_B1,1B0,1SEND_B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,1WAIT_SEND_B1,\
1WAIT_SEND_B0
"""


def test_the_waits_of_torch_2_15_are_skipped_and_written_where_it_has_them():
    schedule = from_csv(OF_TORCH_2_15, "gpipe")
    assert not any("WAIT" in cell for row in spelled(schedule) for cell in row)
    check(schedule)
    assert to_csv(schedule, waits=True) == OF_TORCH_2_15
    assert from_csv(to_csv(schedule), "gpipe") == schedule


@pytest.mark.parametrize("cell", ["0WAIT_F0", "WAIT_SEND_F0", "0WAIT_SEND_F", "0WAIT_REDUCE_GRAD0", "0WAIT"])
def test_a_wait_that_torch_does_not_know_is_refused(cell):
    with pytest.raises(ScheduleError, match="line 1, column 2"):
        from_csv(f"0F0,{cell},0B0\n", "it")


def test_every_cell_that_cannot_be_read_is_named():
    with pytest.raises(ScheduleError) as raised:
        from_csv("0F0,0X1,0B0\n1F,1F0,F1\n", "mine")
    lines = str(raised.value).splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("line 1, column 2: '0X1' is not an action")
    assert "line 2, column 1: '1F': F needs a microbatch number after it" in lines[2]
    assert "line 2, column 3: 'F1': F needs a stage number in front" in lines[3]


@pytest.mark.parametrize("number", ["30000000", "999999999999999999"])
def test_a_microbatch_that_the_rows_can_not_reach_is_refused_at_once(number):
    says = rf"microbatch {number} is named, but the rows have only 1 forward: number the microbatches 0, 1, 2, \.\.\."
    with pytest.raises(ScheduleError, match=says):
        from_csv(f"0F{number},0B{number}\n", "tiny")


def test_a_quote_without_an_end_is_told():
    with pytest.raises(ScheduleError, match="line 2: unexpected end of data: does a quote have no end"):
        from_csv('0F0,0B0\n"1F0,1B0\n', "it")
