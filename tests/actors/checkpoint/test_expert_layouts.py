"""Checkpoints of experts on several actors: every layout reads what another has written, and training goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raypar.actors.checkpoint.reports import written_of
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.results import losses_of, mean_loss
from raypar.checkpoint import Save, manifest_of
from raypar.cli.main import run_command
from raypar.config.recipes import recipe
from tests.support.snapshots import loaded, read, saved
from tests.support.team import Team
from tests.support.thinned import thinned

TINY = recipe("moe-tiny")
MOE = replace(TINY.model.moe, gate="sigmoid", bias_rate=0.01)  # a bias that is saved with the weights
RUN = replace(TINY, model=replace(TINY.model, layers=2, dropout=0.0, moe=MOE), microbatches=4, steps=4, timeout=20.0)
LAYOUTS = {
    "one actor": {"mesh": Mesh()},
    "ep 2 x dp 2": {"mesh": Mesh(dp=4, ep=2), "microbatches": 1},
    "ep 2 x dp 2, zero 3": {"mesh": Mesh(dp=4, ep=2), "zero": 3, "microbatches": 1},
    "on tensor ranks, zero 2": {"mesh": Mesh(dp=2, tp=2, ep=2), "zero": 2, "microbatches": 2},
    "tensor-parallel experts": {"mesh": Mesh(dp=2, tp=2, ep=2, etp=2), "zero": 0, "microbatches": 2},
    "pipeline": {"mesh": Mesh(pp=2, dp=2, ep=2), "microbatches": 2},
}
SHORT = ("ep 2 x dp 2, zero 3", "tensor-parallel experts")


def team_of(layout):
    return Team.of(replace(RUN, **LAYOUTS[layout]))


def losses(team, steps):
    return [mean_loss(*losses_of(team.step(step))) for step in steps]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What each layout has saved after two steps, by layout: the folder, the tensors, and the next two losses."""
    found = {}

    def of(layout):
        if layout not in found:
            folder, team = tmp_path_factory.mktemp("saved"), team_of(layout)
            losses(team, range(2))
            found[layout] = folder, saved(team, folder), losses(team, range(2, 4))
        return found[layout]

    return of


@pytest.mark.sampled
@pytest.mark.parametrize("layout", thinned(LAYOUTS, SHORT.__contains__))
def test_a_layout_goes_on_bitwise(layout, written):
    folder, tensors, wanted = written(layout)
    assert losses(loaded(team_of(layout), folder, tensors), range(2, 4)) == wanted


@pytest.mark.long
@pytest.mark.parametrize("there", thinned(list(LAYOUTS)[1:], SHORT.__contains__))
def test_one_actor_and_a_layout_read_what_the_other_has_written(there, written, tmp_path):
    alone = "one actor"
    for here, other in ((alone, there), (there, alone)):
        folder, tensors, wanted = written(here)
        team = loaded(team_of(other), folder, tensors)
        again, _ = read(team, tmp_path / here)
        first, _ = read(loaded(team_of(here), folder, tensors), tmp_path / f"{here} again")
        names = {name for name in first if not name.startswith("buffers.dp")}  # as many as there are replicas
        assert names <= again.keys()
        assert all(torch.equal(again[name], first[name]) for name in names)
        assert any(name.endswith("router.bias") for name in first.keys() - names)
        assert losses(team, range(2, 4)) == pytest.approx(wanted, rel=2e-5)


def test_every_part_of_an_expert_is_written_once_and_the_commands_read_it(written, tmp_path, capsys):
    _, tensors, _ = written("tensor-parallel experts")
    ups = [logical for name, logical in tensors.items() if name.endswith("up.weight") and not name.startswith("optim")]
    assert [len(logical.slices) for logical in ups] == [2] * RUN.model.layers * MOE.experts
    team = team_of("tensor-parallel experts")
    with Save(tmp_path, 2) as under_way:
        team.each(lambda actor: actor.stage())
        shards = team.each(lambda actor: actor.write(str(under_way.path)))
        under_way.commit(manifest_of(2, 0, {"steps": 4}, written_of(one for one in shards if one is not None)), None)
    assert run_command(["ckpt", "verify", str(tmp_path)]) == 0
    assert run_command(["ckpt", "ls", str(tmp_path)]) == 0
    weights = len(team.weights()) + RUN.model.layers * team.run.mesh.dp  # each replica has its routers' biases
    assert f"{weights} tensors of the model, 0 of the optimizer" in capsys.readouterr().out, "no step was taken"
