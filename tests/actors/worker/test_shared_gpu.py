"""Several actors of one GPU over NCCL, without a GPU: the cases of tests/gpu/shared_gpu.py over a stand-in of NCCL."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from raypar.actors.collective.gpu.group import ring
from raypar.actors.errors import ActionError
from raypar.actors.specs.worlds import world_of
from raypar.parity.verify import relative_error, train_plainly
from raypar.reporting.report import reports_of
from raypar.schedules.action import Op
from tests.gpu.fakes import fake_nccl
from tests.gpu.nccl_team import nccl_groups, nccl_teams
from tests.gpu.ops import together
from tests.gpu.shared_gpu import CHECKS, RUNS, SIZES, STEPS, every_check, every_failing, every_run, run_of

CLOSE, HALF = (1e-5, 1e-2), (2e-2, 5e-2)  # relative: of losses and of weights, in fp32 and with half precision


@pytest.fixture
def over_nccl():
    """Makes NcclTeams, and closes them."""
    with nccl_teams() as make:
        yield make


@pytest.mark.each_value
@every_check
def test_a_group(check, size):
    with fake_nccl():
        groups = nccl_groups("dp", size, 30.0)
        try:
            together(size, lambda rank: groups[rank].connect(ring(size)))
            together(size, lambda rank: CHECKS[check](groups[rank]))
        finally:
            for group in groups:
                group.abort()


@pytest.mark.sampled
@every_run
def test_a_run_trains_what_one_process_does(over_nccl, name):
    run = run_of(name, device="cpu")
    team, plain = over_nccl(run=run), train_plainly(run)
    losses = [reports_of(step, 1.0, team.step(step), team.world)[0].loss for step in range(STEPS)]
    of_losses, of_weights = HALF if run.precision.is_half else CLOSE
    assert losses == pytest.approx(plain.losses, rel=of_losses)
    weights = team.weights()
    assert max(relative_error(weights[name], weight) for name, weight in plain.weights.items()) < of_weights


@every_failing
def test_an_actor_that_fails_in_the_middle_of_a_step_ends_it_for_all(over_nccl, name):
    """And new groups, as after a recovery, train on."""
    run, full = run_of(name, device="cpu"), ValueError("its memory is full")
    team = over_nccl(run=run)
    team.all[1].member._methods[Op.B] = Mock(side_effect=full)

    def train(actor):
        try:
            return actor.train(0)
        except ActionError:
            team.close()  # as the driver does
            raise

    errors = team.each(train)
    assert all(isinstance(error, ActionError) for error in errors)
    assert [error.reason for error in errors if not error.secondary] == [f"ValueError: {full}"]
    over_nccl(run=run).step(0)


def test_every_axis_level_and_precision_is_tried_on_two_and_four_actors():
    for size in SIZES:
        runs = [run for run in map(run_of, RUNS) if world_of(run).size == size]
        meshes = [run.mesh for run in runs]
        for axis in ("dp", "pp", "tp", "cp", "ep"):
            assert any(getattr(mesh, axis) > 1 for mesh in meshes), (axis, size)
        assert {run.zero for run in runs} >= {0, 1, 2, 3}
        assert {run.precision.compute for run in runs} == {"fp32", "bf16", "fp16"}
        assert any(run.schedule == "zb-h1" for run in runs)
    assert {world_of(run).size for run in map(run_of, RUNS)} == {*SIZES}
