"""The seconds in which a launch draws and sends initial values, on paper."""

from __future__ import annotations

import pytest

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import GPT
from raypar.actors.specs.run import Run
from raypar.cli.plan.zero_levels import zero_levels_table
from raypar.config.run import check_run
from raypar.planner.assumed_rates import rates_of
from raypar.planner.sizes.sized_run import SizedRun
from raypar.planner.traffic import DRAW, initial_seconds
from raypar.schedules.formatting import milliseconds

MODEL = GPT(layers=4, hidden=64, heads=4, seq=32, vocab=256)
RATE = 1e9


def seconds(mesh, rate=RATE, model=MODEL, **changes):
    run = Run(model=model, mesh=mesh, microbatches=8, device="cpu", **changes)
    sized = SizedRun.of(run, check_run(run)["train"])
    return initial_seconds(sized, rate), max(sized.counts.held)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_share_the_draws_and_get_all_values_or_their_spans(zero):
    found, held = seconds(Mesh(dp=4), zero=zero)
    received = {0: 0, 3: 3 / 16}.get(zero, 3 / 4)
    assert found == pytest.approx(held * (DRAW / (4 if zero else 1) + 4 * received / RATE))


def test_tensor_ranks_draw_together_and_get_their_slices():
    found, held = seconds(Mesh(tp=4))
    assert found == pytest.approx(held * (DRAW + 4 * 3 / 4 / RATE))


def test_each_replica_draws_its_share():
    alone, held = seconds(Mesh(), rate=1e30)
    found, _ = seconds(Mesh(dp=8), rate=1e30, zero=3)
    assert alone == pytest.approx(held * DRAW)
    assert found == pytest.approx(alone / 8)


def test_a_plan_says_the_seconds():
    run = Run(model=MODEL, mesh=Mesh(dp=2), microbatches=8, device="cpu", zero=1)
    expected = initial_seconds(SizedRun.of(run, check_run(run)["train"]), rates_of(run).bytes)
    rows = {line.split("  ")[0]: line for line in zero_levels_table(run).splitlines()}
    assert milliseconds(expected) in rows["initial values, predicted"]
