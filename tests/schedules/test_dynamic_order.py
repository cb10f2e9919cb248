"""The dynamic order: whatever arrives when, it never stops, holds no more than the rows do, and is a sound schedule."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest

from raypar.schedules.action import COMPUTE, Op
from raypar.schedules.catalog import build
from raypar.schedules.checking.check import check
from raypar.schedules.dynamic_order import DynamicOrder
from raypar.schedules.passes.lower import lower
from raypar.schedules.passes.split_backward import split_backward
from raypar.schedules.reading.torch_csv import from_csv, to_csv
from raypar.schedules.rules import most_in_flight
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.simulate import Costs

WINDOW = 2


def played(schedule, seconds, window=WINDOW):
    """Actors that perform what they are given one after the other; an action lasts as long as ``seconds`` says."""
    order = DynamicOrder(schedule, window)
    free, events, rows, now = [0.0] * schedule.num_ranks, [], [[] for _ in schedule.rows], 0.0
    while not order.is_over:
        for rank in range(schedule.num_ranks):
            for action in order.take(rank):
                free[rank] = max(free[rank], now) + (seconds(rank, action) if action.op in COMPUTE else 0.0)
                heapq.heappush(events, (free[rank], sum(map(len, rows)), rank, action))
                rows[rank].append(action)
        if order.is_over:
            break
        now, _, rank, action = heapq.heappop(events)
        order.done(rank, action)
    return replace(schedule, rows=tuple(map(tuple, rows))), max(free)


def actions_of(schedule):
    return [sorted(map(str, row)) for row in schedule.rows]


SIZES = [("1f1b", 4, 8, 1), ("gpipe", 2, 4, 1), ("interleaved", 4, 8, 2), ("zb-v", 3, 6, 2), ("v-min", 4, 8, 2)]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), SIZES)
@pytest.mark.parametrize("halves", [False, True], ids=["", "halves"])
def test_whatever_lasts_how_long_it_is_a_sound_schedule(name, ranks, microbatches, chunks, halves):
    schedule = lower(build(name, ranks, microbatches, chunks), reduce_grad=True)
    if halves:
        schedule = split_backward(schedule, Costs(), every=True)
    for seed in range(20):
        drawn = random.Random(seed)
        happened, _ = played(schedule, lambda rank, action, drawn=drawn: drawn.choice([0.1, 1.0, 5.0]))
        assert actions_of(happened) == actions_of(schedule)
        check(happened, send_capacity=WINDOW, max_in_flight=max(most_in_flight(schedule)))
        assert all(map(int.__le__, most_in_flight(happened), most_in_flight(schedule)))
        read = from_csv(to_csv(happened), "again")
        assert read.rows == happened.rows


def test_the_row_is_kept_where_everything_comes_as_it_says():
    schedule = lower(build("1f1b", 2, 4, 1))
    happened, _ = played(schedule, lambda rank, action: {Op.F: 1.0, Op.B: 2.0}[action.op])
    assert _computed(happened) == _computed(schedule)


def test_a_late_value_is_not_waited_for():
    """Rank 1 is slow with its first forward: rank 0 takes another one, which comes later in its row."""
    schedule = lower(build("interleaved", 2, 4, 2))
    seconds = lambda rank, action: 9.0 if str(action) == "1F0" else 1.0  # noqa: E731
    happened, took = played(schedule, seconds, window=8)
    (free, _), row = _computed(happened), _computed(schedule)[0]
    assert free.index("2F0") > row.index("2F0")
    assert took < 9.0 + 23.0, "of 32 actions that last 1 or 9, rank 0 has done some meanwhile"


def test_room_that_the_row_needs_later_is_left():
    """Two chunks of one rank with room for two microbatches: forwards of the first chunk alone would fill it, and no
    backward could ever come."""
    rows = [["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1", "0F2", "1F2", "1B2", "0B2"]]
    schedule = lower(Schedule.of("tight", rows))
    assert played(schedule, lambda rank, action: 1.0)[0].rows == schedule.rows


def _computed(schedule):
    return [[str(action) for action in row if action.op in COMPUTE] for row in schedule.rows]
