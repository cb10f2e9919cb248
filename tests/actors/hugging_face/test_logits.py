"""Models of transformers give the same logits as ours with their weights, on one actor and divided, on threads."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import raypar as rp
from raypar.actors.models.build import build_model
from raypar.actors.specs.results import losses_of
from tests.support.hugging_face import CONFIGS, logits_of, saved, some_ids
from tests.support.team import Team

pytest.importorskip("transformers")

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def given(request, tmp_path_factory):
    """A folder, and what transformers computes with it."""
    folder = tmp_path_factory.mktemp("hf")
    theirs = saved(request.param, folder)
    with torch.no_grad():
        return folder, theirs(some_ids()).logits


def run_of(folder, mesh=None, **changes):
    ids = some_ids()

    def batch(step, microbatch, dp):
        one = slice(microbatch * 2 + dp, microbatch * 2 + dp + 1)
        return ids[one], torch.roll(ids, -1, 1)[one]

    fields = {"model": rp.HF(folder, seq=12), "data": rp.Batches(batch, batch), "microbatches": 2, "timeout": 20.0}
    return rp.Run(mesh=mesh or rp.Mesh(), **fields | changes)


def test_the_logits_are_theirs(given):
    folder, wanted = given
    model = build_model(rp.HF(folder, seq=12), 0)
    out = some_ids()
    for layer in model.materialize(range(len(model.names)), 0):
        out = layer.eval()(out)
    assert wanted.std() > 0.3
    torch.testing.assert_close(out, wanted, **CLOSE)


@pytest.mark.parametrize("mesh", [rp.Mesh(pp=2), rp.Mesh(tp=2), rp.Mesh(pp=2, tp=2)], ids=str)
def test_the_logits_are_theirs_on_meshes(given, mesh):
    folder, wanted = given
    torch.testing.assert_close(logits_of(Team.of(run_of(folder, mesh)), some_ids()), wanted, **CLOSE)


def test_the_losses_are_theirs_where_replicas_share_the_weights(given):
    folder, wanted = given
    losses, _ = losses_of(Team.of(run_of(folder, rp.Mesh(dp=2), zero=3)).step(0, "evaluate"))
    labels = torch.roll(some_ids(), -1, 1)
    theirs = [cross_entropy(logits, label).item() for logits, label in zip(wanted, labels, strict=True)]
    assert losses == pytest.approx(theirs, rel=1e-5)
