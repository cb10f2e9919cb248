"""What a step is predicted to take: FLOPs of layers, and of what is run again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypar.actors.specs import GPT, Llama
from raypar.actors.split import core_cost, transformer_costs
from raypar.config import Run, check_run
from raypar.summary import predicted

GPTS = GPT(layers=4, hidden=64, heads=4, seq=128, attention="materialised")


def makespan(model, recompute):
    run = Run(model=model, schedule="naive", microbatches=1, recompute=recompute)
    return predicted(run, check_run(run)["train"]).makespan


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
