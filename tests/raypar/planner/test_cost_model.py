"""What a step is predicted to take: FLOPs of layers, and of what is run again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.partition import core_cost, transformer_costs
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.run import Run
from raypar.config.recipes import recipe
from raypar.config.run import check_run
from raypar.planner.cost_model import costs_of_run
from raypar.planner.prediction import from_flops
from raypar.reporting.summary import plan_rows
from raypar.schedules.action import Action, Op
from raypar.schedules.catalog import build
from raypar.schedules.passes.lower import lower
from raypar.schedules.passes.split_backward import split_backward
from raypar.schedules.simulation.simulate import simulate

GPTS = GPT(layers=4, hidden=64, heads=4, seq=128, attention="materialised")


def makespan(model, recompute):
    run = Run(model=model, schedule="naive", microbatches=1, recompute=recompute)
    return from_flops(run, check_run(run)["train"]).timeline.makespan


@pytest.mark.parametrize("model", [GPTS, Llama(layers=4, hidden=64, heads=4, kv_heads=1, seq=128, dropout=0.1)])
def test_a_backward_takes_what_it_runs_again_too(model):
    costs, core = transformer_costs(model), core_cost(model)
    whole = sum(costs)
    step = makespan(model, "none") - 3 * whole  # what is not computed: the update
    assert makespan(model, "full") == pytest.approx(4 * whole + step)
    assert makespan(model, "selective") == pytest.approx(3 * whole + 4 * core + step)
    mixed = ("none", "full", "selective", "none")
    assert makespan(model, mixed) == pytest.approx(3 * whole + costs[1] + core + step)


def test_the_fused_kernel_runs_nothing_again_on_account_of_selective():
    fused = replace(GPTS, attention="fused")
    assert makespan(fused, "selective") == makespan(fused, "none")


@pytest.mark.parametrize(
    ("recompute", "tp", "later"),
    [("none", 1, 2), ("full", 1, 2), ("selective", 1, 2), (("none", "none", "full", "none"), 1, 1), ("none", 2, 0)],
)
def test_a_step_is_shorter_on_account_of_what_backwards_leave_for_later(recompute, tp, later):
    """Weights of blocks, but not of those that are run again by themselves or divided; their cores have none."""
    model = replace(GPTS, vocab=0)
    run = Run(model=model, mesh=Mesh(pp=2, tp=tp), schedule="1f1b", microbatches=2, recompute=recompute)
    whole, core = max(transformer_costs(model)), core_cost(model)
    schedule, costs = lower(build("1f1b", 2, 2)), costs_of_run(run, 2)
    first, second, backward = (costs.of(Action(1, op, 0)) for op in (Op.I, Op.W, Op.B))
    assert first + second == pytest.approx(backward)
    assert second == pytest.approx(later * (whole - 2 * model.hidden - core))
    split = split_backward(schedule, costs, hold=recompute == "none")
    assert (from_flops(run, split).timeline.makespan < simulate(schedule, costs).makespan) == (later > 0)


def test_a_dry_run_tells_of_backwards_that_are_done_in_halves():
    run = replace(recipe("gpt-tiny"), mesh=Mesh(pp=2))
    schedule = check_run(run)["train"]
    halved = [sum(action.op is Op.I for action in row) for row in schedule.rows]
    assert any(halved)
    assert dict(plan_rows(run, schedule))["backwards in halves"].startswith(" ".join(map(str, halved)) + ": ")
    alone = replace(run, mesh=Mesh(pp=1))
    assert "backwards in halves" not in dict(plan_rows(alone, check_run(alone)["train"]))
