"""The programs of a run with further passes: both are changed before the check, and before backwards are split."""

from __future__ import annotations

from functools import partial

import pytest

from raypar.config.schedule import programs_of, with_backward
from raypar.schedules import Costs, ScheduleError, check
from raypar.schedules.action import Op
from raypar.schedules.passes.gather_weights import gather_weights
from raypar.schedules.passes.reduce_gradients import reduce_gradients

PASSES = (partial(reduce_gradients, when="microbatch"), partial(gather_weights, when="microbatch"))


def count(program, op):
    return sum(action.op is op for row in program.rows for action in row)


def test_training_and_evaluation_gather_and_only_training_reduces():
    programs = programs_of("1f1b", 2, 4, None, passes=PASSES)
    train, evaluate = programs["train"], programs["evaluate"]
    assert [count(train, op) for op in (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)] == [16, 16, 8]
    assert [count(evaluate, op) for op in (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)] == [8, 8, 0]
    split = with_backward(programs, "split", Costs(), hold=True)["train"]
    assert (count(split, Op.B), count(split, Op.UNSHARD), count(split, Op.REDUCE_GRAD)) == (0, 16, 8)
    check(split)


def test_the_check_comes_after_the_last_pass_and_its_example_has_gone_through_it():
    def half(schedule):
        found = gather_weights(schedule, "step")
        return type(found).of(
            found.name, [[a for a in row if a.op is not Op.RESHARD] for row in found.rows], lowered=True
        )

    with pytest.raises(ScheduleError, match=r"(?s)weights: rank 0, action 0: stage 0 is still whole .* 1 microbatch"):
        programs_of("1f1b", 4, 8, None, passes=[half])
