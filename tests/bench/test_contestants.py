"""Every contestant takes some steps at the smallest size, and has the losses of one process that trains alone."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec

import pytest

from raypar.config.run import check_run
from tests.bench.child import build
from tests.bench.contestants import CONTESTANTS, REFERENCE
from tests.bench.figures import mean_losses
from tests.bench.processes import Processes, free_port
from tests.bench.workload import RANKS, SIZES, run_of

STEPS = 2
EXTRA = "needs the extra bench (pip install 'raypar[bench]'): "
PEERS = [one.name for one in CONTESTANTS.values() if one.processes == RANKS and not one.apart]
OURS = [one.name for one in CONTESTANTS.values() if one.ours]
OWN_MODEL = [name for name in OURS if "model" in CONTESTANTS[name].settings]


def size_of(name: str) -> str:
    """The name of the size at which a contestant takes part."""
    return "smallest-moe" if CONTESTANTS[name].kinds == ("experts",) else "smallest"


@cache
def reference(size: str) -> list[float]:
    """The losses of one process."""
    return build(CONTESTANTS[REFERENCE], SIZES[size], 0).train(0, STEPS)


def skip_without(*modules: str) -> None:
    """Skip a test where a part of the extra is absent."""
    if absent := [module for module in modules if find_spec(module) is None]:
        pytest.skip(f"{EXTRA}no {' and no '.join(absent)}")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Two processes for all peers."""
    environment = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.peer_ranks"]
    processes = Processes("ranks", [command] * RANKS, tmp_path_factory.mktemp("ranks"), environment)
    yield processes
    processes.kill()


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_has_the_losses_of_one_process(ranks, name):
    if "deepspeed" in CONTESTANTS[name].loop:
        skip_without("deepspeed")
    losses = mean_losses(ranks.ask(name, size_of(name), free_port(), STEPS, seconds=100))
    drops = name == "deepspeed-moe-dropping"
    assert losses == pytest.approx(reference(size_of(name)), rel=0.1 if drops else 1e-5)


def test_ray_train_has_the_losses_of_one_process(cluster):
    skip_without("pandas", "pyarrow")
    trainer = build(CONTESTANTS["ray-train"], SIZES["smallest"], 0)
    try:
        assert trainer.train(0, STEPS) == pytest.approx(reference("smallest"), rel=1e-5)
        assert len(trainer.peak()) == RANKS
    finally:
        trainer.close()


@pytest.mark.parametrize("name", [name for name in OURS if name not in OWN_MODEL])
def test_raypar_has_the_losses_of_one_process(cluster, kept_actors, name):
    trainer = build(CONTESTANTS[name], SIZES[size_of(name)], 0)
    try:
        assert trainer.train(0, STEPS) == pytest.approx(reference(size_of(name)), rel=1e-5)
        assert all(seconds >= 0 for seconds in trainer.waited().values())
    finally:
        trainer.close()


@pytest.mark.parametrize("name", OWN_MODEL)
def test_a_run_with_a_model_of_its_own_has_no_faults(name):
    contestant = CONTESTANTS[name]
    check_run(run_of(SIZES["moe"], contestant.layout, **contestant.settings))
