"""Offload: the numbers of the same run without it, with masters, states, sums of gradients or weights elsewhere."""

from __future__ import annotations

import pytest

from raypar.actors.specs.optim import SGD, AdamW, Muon
from raypar.actors.specs.precision import Precision
from tests.actors.data_parallel.test_memory import equal, formulas
from tests.support.team import Team, linears

ADAM = {"optim": AdamW(lr=0.01), "clip": 0.5}
LAYOUTS = {
    "alone": {"pp": 1},
    "pp=2": {"pp": 2},
    "zero 0": {"pp": 1, "dp": 2, "zero": 0},
    "zero 1": {"pp": 1, "dp": 2, "zero": 1},
    "zero 2": {"pp": 1, "dp": 2, "zero": 2},
    "zero 3": {"pp": 2, "dp": 2, "zero": 3},
    "hybrid": {"pp": 1, "dp": 4, "shard": 2, "zero": 2},
}
PRECISIONS = {"fp32": Precision(), "bf16": Precision("bf16"), "sums in bf16": Precision("bf16", reduce="bf16")}


def bits(**changes):
    fields = {"fn": linears(4), "m": 2, "bucket_mb": 1e-4, **ADAM}
    team = Team(**(fields | changes))
    losses = [[result.losses for result in team.step(number)] for number in range(3)]
    norms = [result.grad_norm for result in team.step(3)]
    gradients = {name: None if made is None else made.tolist() for name, made in team.gradients().items()}
    masters = [{name: one.tolist() for name, one in worker.masters().items()} for worker in team.workers]
    return losses, norms, gradients, masters


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_offload_changes_no_bit(layout, offload, precision, tmp_path):
    fields = LAYOUTS[layout] | {"precision": PRECISIONS[precision]}
    assert bits(**fields, offload=offload, offload_folder=str(tmp_path)) == bits(**fields)
    assert not list(tmp_path.iterdir()), "the file has no name"


def kinds(part, worker):
    """What lies at home, and what on the device, of everything that a worker keeps."""
    home, states = (
        part.storage,
        [value for _, kept, value in worker.member.state.update.state() if kept and value.dim()],
    )
    masters = list(part.masters.parameters.values())
    gradients = [master.grad for master in masters]
    return {
        "states": {home.holds(one) for one in states},
        "masters": {home.holds(one) for one in masters},
        "gradients": {home.holds(one) for one in gradients},
        "weights": {home.holds(one) for one in part.held},
        "layers": {home.holds(one) for one in part.parameters.values()},
    }


@pytest.mark.each_value
@pytest.mark.parametrize("optim", [AdamW(), SGD(), Muon(adamw=("*.bias",))], ids=lambda optim: optim.kind)
@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
@pytest.mark.parametrize("layout", ["alone", "zero 1", "zero 3"])
def test_what_is_offloaded_is_at_home(layout, offload, optim, tmp_path):
    for folder in (None, str(tmp_path)):
        team = Team(linears(4), m=2, **LAYOUTS[layout], optim=optim, offload=offload, offload_folder=folder)
        team.step(0)
        for worker in team.workers:
            part, whole = worker.member.parts.part, offload == "parameters"
            assert kinds(part, worker) == {
                "states": {True}, "masters": {True}, "gradients": {True},
                "weights": {whole}, "layers": {False},
            }  # fmt: skip


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_account_is_what_actors_hold_on_the_device_and_elsewhere(layout, offload, precision):
    fields = LAYOUTS[layout] | {"precision": PRECISIONS[precision], "offload": offload}
    team = Team(equal(32), m=2, optim=AdamW(), clip=None, **fields)
    team.step(0)
    for worker, formula in zip(team.workers, formulas(team), strict=True):
        held = worker.held().most
        assert held["gradients"] == held["optimizer"] - sum(4 for _ in worker.masters()) == 0  # Adam's numbers of steps
        assert held["weights"] == formula.weights
        assert held["offloaded"] == pytest.approx(formula.offloaded, rel=0.1)  # a flag for each of 16 elements
        assert held.get("gathered", 0) == formula.gathered
