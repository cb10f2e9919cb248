"""The programs of a run with sharded weights: both gather, and the check comes after the last pass."""

from __future__ import annotations

import pytest

import raypar as rp
from raypar.config.run import check_run
from raypar.config.schedule import ZeroActions, load, programs_of, with_backward, with_zero
from raypar.planner.cost_model import costs_of_run
from raypar.schedules import Costs, ScheduleError, build, check, lower, simulate
from raypar.schedules.action import Op
from raypar.schedules.passes.gather_weights import gather_weights


def count(program, op):
    return sum(action.op is op for row in program.rows for action in row)


def test_training_and_evaluation_gather_and_only_training_reduces():
    programs = with_zero(programs_of("1f1b", 2, 4, None), ZeroActions("microbatch", "microbatch"))
    train, evaluate = programs["train"], programs["evaluate"]
    assert [count(train, op) for op in (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)] == [16, 16, 8]
    assert [count(evaluate, op) for op in (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)] == [8, 8, 0]


def test_backwards_that_are_split_reduce_and_gather_as_well():
    split = with_backward(programs_of("1f1b", 2, 4, None), "split", Costs(), hold=True)
    train = with_zero(split, ZeroActions("microbatch", "microbatch"))["train"]
    assert (count(train, Op.B), count(train, Op.UNSHARD), count(train, Op.REDUCE_GRAD)) == (0, 16, 8)
    check(train)


def test_a_schedule_s_check_comes_after_its_last_pass_and_its_example_has_gone_through_it():
    def half(schedule):
        found = gather_weights(schedule, "step")
        return type(found).of(
            found.name, [[a for a in row if a.op is not Op.RESHARD] for row in found.rows], lowered=True
        )

    with pytest.raises(ScheduleError, match=r"(?s)weights: rank 0, action 0: stage 0 is still whole .* 1 microbatch"):
        load("1f1b", 4, 8, None).lowered(passes=[half])


def test_an_automatic_schedule_is_searched_for_the_costs_of_the_run():
    run = rp.recipe("gpt-small", mesh=rp.Mesh(pp=4), microbatches=8, schedule="zb-2p")
    train = check_run(run)["train"]
    costs = costs_of_run(run, 4)
    assert train == lower(build("zb-2p", 4, 8, costs=costs))
    assert train != lower(build("zb-2p", 4, 8)), "its last stage has the head"
    assert simulate(train, costs).makespan < simulate(lower(build("zb-h1", 4, 8)), costs).makespan
