"""DualPipe: the rows of DualPipeV on twice the actors, microbatches from both ends."""

import re

import pytest

from raypar.schedules import Costs, ScheduleError, build, check, lower, simulate
from raypar.schedules.action import Action, Op
from raypar.schedules.reading.torch_csv import from_csv, to_csv

SIZES = [(ranks, microbatches) for ranks in (1, 2, 3, 4) for microbatches in (2, 4, 6, 8, 14, 20)]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_both_directions_are_the_folded_pipeline(ranks, microbatches):
    both, folded = build("dualpipe", ranks, microbatches), build("dualpipe-v", ranks, microbatches // 2)
    assert (both.num_ranks, both.replicas, both.placement) == (2 * ranks, (2,) * ranks, folded.placement)
    for rank, row in enumerate(folded.rows):
        for replica, here in enumerate(both.rows_of(rank)):
            turned = [replica if stage < ranks else 1 - replica for stage, *_ in row]
            assert [one[:2] for one in both.rows[here]] == [one[:2] for one in row]
            assert [one.microbatch for one in both.rows[here]] == [
                2 * one.microbatch + turn for one, turn in zip(row, turned, strict=True)
            ]
    check(both)
    check(lower(both, "one_sweep", reduce_grad=True), send_capacity=0)
    check(lowered := lower(both, reduce_grad=True), send_capacity=2)
    assert from_csv(to_csv(lowered), "dualpipe") == lowered, "rows say it all"
    costs = Costs(f=3.0, b=5.0)  # without links, of which a V has none at its end
    times = [simulate(one, costs) for one in (both, lower(both), folded)]
    assert len({time.makespan for time in times}) == 1
    assert times[0].in_flight == tuple(held for held in times[2].in_flight for _ in range(2))


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_every_message_goes_on_along_the_line(ranks, microbatches):
    """Of the 2p actors in a line, replica 0 of each rank and then replica 1 of each, backwards."""
    line = [*range(0, 2 * ranks, 2), *reversed(range(1, 2 * ranks, 2))]
    both = lower(build("dualpipe", ranks, microbatches))
    for microbatch in range(microbatches):
        way = [both.row_of(stage, microbatch) for stage in range(2 * ranks)]
        assert way == (line if microbatch % 2 == 0 else line[::-1])
    for row, actions in enumerate(both.rows):
        sent = {(one.stage, one.microbatch) for one in actions if one.op is Op.SEND_F}
        assert sent == {
            (stage, number)
            for stage in both.stages_of(row)
            for number in both.microbatches_of(row, stage)
            if stage < 2 * ranks - 1
        }


def test_what_is_on_the_wrong_replica_is_told():
    both = build("dualpipe", 2, 8)
    rows = [[str(action) for action in row] for row in both.rows]
    rows[0], rows[1] = rows[0][:-1], [*rows[1], rows[0][-1]]
    with pytest.raises(ScheduleError, match=r"take its microbatches in turn: 0W6 belongs on rank 0"):
        type(both).of("mine", rows)


def test_what_the_other_replica_makes_is_awaited():
    """The middle two stages are on one rank, and no microbatch computes them on one actor."""
    both = build("dualpipe", 1, 2)
    assert [str(one) for one in lower(both).rows[1]][:4] == ["0F1", "0SEND_F1", "1RECV_F0", "1F0"]
    turned = [Action(1, Op.F, 1), *(one for one in both.rows[0] if one != Action(1, Op.F, 1))]
    check(type(both).of("mine", [turned, both.rows[1]]))
    other = [Action(1, Op.F, 0), *(one for one in both.rows[1] if one != Action(1, Op.F, 0))]
    with pytest.raises(ScheduleError, match=r"waits? for"):
        check(type(both).of("mine", [turned, other]))


@pytest.mark.parametrize(
    ("microbatches", "chunks", "replicas", "says"),
    [
        (5, None, (), "microbatches=5: dualpipe takes a multiple of 2: set microbatches to 6"),
        (8, 3, (), "chunks=3: dualpipe takes at most 2 stages a rank: each actor has two stages"),
        (
            8,
            None,
            (2, 1),
            "cannot be made: replicas are 2-1, but every stage is held twice: give each of 2 ranks 2 (mesh.rank_dp)",
        ),
    ],
)
def test_other_sizes_are_told(microbatches, chunks, replicas, says):
    with pytest.raises(ScheduleError, match=re.escape(says)):
        build("dualpipe", 2, microbatches, chunks, replicas=replicas)
