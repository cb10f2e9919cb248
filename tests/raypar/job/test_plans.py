"""What travels to an actor: one description of the run, and this actor's row."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from torch import nn

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.data import Text
from raypar.actors.specs.model import GPT, Layers
from raypar.actors.specs.run import Run
from raypar.config.run import check_run
from raypar.job.start.actor_plans import begun, plans_of
from raypar.schedules import build

RANKS = 64
LARGEST = 4_200  # bytes of a plan here: the run, the row, and nothing that grows with the square of the ranks


def plans_for(run):
    return plans_of(run, check_run(run), "job")


def test_no_actor_gets_the_rows_of_all_others():
    """A run may bring a whole Schedule; the plan of a rank is then as large as if it was asked for by its name."""
    run = Run(model=GPT(layers=RANKS, seq=8), mesh=Mesh(pp=RANKS), microbatches=8)
    written = replace(run, schedule=build("1f1b", RANKS, 8))
    named, whole = ([len(pickle.dumps(plan)) for plan in plans_for(one)] for one in (run, written))
    assert whole == named
    assert max(whole) <= LARGEST
    assert 4 * max(whole) < len(pickle.dumps(written))


def test_a_plan_has_the_run_itself_with_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("so many words " * 500)
    run = Run(model=GPT(layers=2, seq=8), mesh=Mesh(pp=2), data=Text("words.txt"), clip=0.5)
    for rank, plan in enumerate(plans_for(run)):
        assert plan.run == replace(run, data=Text(str(tmp_path / "words.txt")))
        assert (plan.rank, plan.device) == (rank, "cpu")


@pytest.mark.parametrize("trained", [True, False])
def test_a_run_that_goes_on_reads_a_folder_again_only_for_what_a_checkpoint_has_not(trained):
    layers = [nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(trained)]
    model = Layers(lambda: layers, nn.functional.mse_loss, hf="/folder")
    found = begun(Run(model=model), Skeleton(model, 0))
    assert found.model.hf == (None if trained else "/folder")
