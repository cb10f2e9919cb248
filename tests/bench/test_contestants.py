"""Every contestant takes some steps at the smallest size, and has the losses of one process that trains alone."""

from __future__ import annotations

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
from tests.support.thinned import thinned

STEPS = 2
EXTRA = "needs the extra bench (pip install 'raypar[bench]'): "
PEERS = [one.name for one in CONTESTANTS.values() if one.processes == RANKS and not one.apart]
OURS = [one.name for one in CONTESTANTS.values() if one.ours]
OWN_MODEL = [name for name in OURS if "model" in CONTESTANTS[name].settings]
OF_EACH_KIND = ("raypar-zero-3-step", "raypar-ep-rounds", "raypar-1f1b", "raypar-tp-sequence")


def size_of(name: str) -> str:
    """The name of the size at which a contestant takes part."""
    return "smallest-moe" if CONTESTANTS[name].kinds == ("experts",) else "smallest"


def skip_without(*modules: str) -> None:
    """Skip a test where a part of the extra is absent."""
    if absent := [module for module in modules if find_spec(module) is None]:
        pytest.skip(f"{EXTRA}no {' and no '.join(absent)}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function: the losses of a contestant's processes at a size, the mean over those that see them."""
    command = [sys.executable, "-m", "tests.support.peer_ranks"]
    folder = tmp_path_factory.mktemp("ranks")
    processes = Processes("ranks", [command], folder, {"OMP_NUM_THREADS": "1"})

    @cache
    def losses(name: str, size: str) -> list[float]:
        (found,) = processes.ask(name, size, free_port(), STEPS, seconds=100)
        assert isinstance(found, list), found
        return mean_losses(found)

    yield losses
    processes.kill()


@pytest.mark.sampled
@pytest.mark.parametrize("name", thinned(PEERS, lambda name: name == PEERS[0]))
def test_a_peer_has_the_losses_of_one_process(trained, name):
    if "deepspeed" in CONTESTANTS[name].loop:
        skip_without("deepspeed")
    size, drops = size_of(name), name == "deepspeed-moe-dropping"
    assert trained(name, size) == pytest.approx(trained(REFERENCE, size), rel=0.1 if drops else 1e-5)


@pytest.mark.long
def test_ray_train_has_the_losses_of_one_process(cluster, trained):
    skip_without("pandas", "pyarrow")
    trainer = build(CONTESTANTS["ray-train"], SIZES["smallest"], 0)
    try:
        assert trainer.train(0, STEPS) == pytest.approx(trained(REFERENCE, "smallest"), rel=1e-5)
        assert len(trainer.peak()) == RANKS
    finally:
        trainer.close()


@pytest.mark.long
@pytest.mark.parametrize("name", thinned((one for one in OURS if one not in OWN_MODEL), OF_EACH_KIND.__contains__))
def test_raypar_has_the_losses_of_one_process(cluster, kept_actors, trained, name):
    size = size_of(name)
    trainer = build(CONTESTANTS[name], SIZES[size], 0)
    try:
        assert trainer.train(0, STEPS) == pytest.approx(trained(REFERENCE, size), rel=1e-5)
        assert all(seconds >= 0 for seconds in trainer.waited().values())
    finally:
        trainer.close()


@pytest.mark.parametrize("name", OURS)
def test_a_run_of_raypar_has_no_faults(name):
    contestant = CONTESTANTS[name]
    check_run(run_of(SIZES[size_of(name)], contestant.layout, **contestant.settings))
