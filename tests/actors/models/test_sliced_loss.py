"""Models with many logits compute their loss from slices of the vocabulary, on every layout, with the same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import raypar as rp
from raypar.actors.layers import linear_cross_entropy
from raypar.actors.specs import model as model_specs
from raypar.actors.specs.results import losses_of, mean_loss
from tests.support.plain import trained
from tests.support.team import Team
from tests.support.tensor_teams import TINY, error, longer

MODEL = replace(TINY, seq=8)
LLAMA = rp.Llama(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, seq=8, vocab=11)


def sometimes_none(step, microbatch, dp):
    """Of the first microbatch no label counts."""
    ids, labels = longer(step, microbatch, dp)
    return ids, labels if microbatch else torch.full_like(labels, -100)


LAYOUTS = {
    "one actor": {},
    "tied": {"model": replace(MODEL, tied=True)},
    "capped": {"model": replace(LLAMA, logit_cap=3.0)},
    "tp": {"mesh": rp.Mesh(tp=2)},
    "tp, tied, along the sequence": {
        "mesh": rp.Mesh(tp=2),
        "model": replace(MODEL, tied=True),
        "sequence_parallel": True,
        "recompute": "selective",
    },
    "zero bubble": {"mesh": rp.Mesh(pp=2), "schedule": "zb-h1", "microbatches": 4},
    "zero bubble, tp": {"mesh": rp.Mesh(pp=2, tp=2), "schedule": "zb-h1", "microbatches": 4},
    "recomputed": {"mesh": rp.Mesh(pp=2), "recompute": "full"},
    "cp": {"mesh": rp.Mesh(cp=2)},
    "zero 3": {"mesh": rp.Mesh(dp=2), "zero": 3, "microbatches": 1},
    "lora": {"model": replace(LLAMA, lora=rp.Lora(rank=2))},
    "experts": {"model": replace(LLAMA, moe=rp.MoE(experts=4))},
    "no labels in a microbatch": {"mesh": rp.Mesh(pp=2, tp=2), "data": rp.Batches(sometimes_none, sometimes_none)},
    "no labels, zero bubble": {
        "mesh": rp.Mesh(pp=2),
        "schedule": "zb-h1",
        "data": rp.Batches(sometimes_none, sometimes_none),
    },
    "slices of the sequence": {"mesh": rp.Mesh(pp=2), "token_slices": 2},
}


def run_of(**changes):
    fields = {"model": MODEL, "data": rp.Batches(longer, longer), "microbatches": 2, "steps": 2, "timeout": 20.0}
    return rp.Run(optim=rp.AdamW(lr=1e-2), **fields | changes)


@pytest.fixture
def sliced(monkeypatch):
    """Returns a function that lets losses be computed from slices, and the widths of those that were."""
    widths, whole = [], linear_cross_entropy.linear_cross_entropy

    def noted(x, weight, labels, spec):
        widths.append(spec.width)
        return whole(x, weight, labels, spec)

    def begin():
        monkeypatch.setattr(model_specs, "_SLICE_LOGITS", 40)
        monkeypatch.setattr(model_specs, "_SLICE_STEP", 1)
        monkeypatch.setattr("raypar.actors.models.transformer.linear_cross_entropy", noted)
        return widths

    return begin


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_computes_what_one_process_does_with_whole_logits(name, sliced):
    run = run_of(**LAYOUTS[name])
    plain = trained(run)
    widths, team = sliced(), Team.of(run)
    assert mean_loss(*losses_of(team.step())) == pytest.approx(plain.losses[0], rel=1e-5)
    first = team.gradients()
    assert mean_loss(*losses_of(team.step(1))) == pytest.approx(plain.losses[1], rel=1e-5)
    assert widths
    for key, wanted in plain.gradients.items():
        if wanted is not None:
            assert error(first[key], wanted) <= 2e-5, key
    for key, weight in team.weights().items():
        assert error(weight, plain.weights.get(key, weight)) <= 1e-3, key


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_as_near_as_with_whole_logits(precision, sliced):
    run = run_of(precision=rp.Precision(precision))
    plain = trained(run)
    widths, team = sliced(), Team.of(run)
    assert mean_loss(*losses_of(team.step(0))) == pytest.approx(plain.losses[0], rel=1e-4)
    assert widths
    found = team.gradients()
    assert all(error(found[key].float(), wanted.float()) < 0.02 for key, wanted in plain.gradients.items())
    assert mean_loss(*losses_of(team.step(0, "evaluate"))) == pytest.approx(plain.losses[1], rel=0.2)


def test_grids_and_tiled_heads_compute_whole_logits(sliced):
    widths = sliced()
    for changes in ({"mesh": rp.Mesh(tp="2d:2x2")}, {"tile": {"head.out": 11}}):
        Team.of(run_of(model=replace(MODEL, vocab=11), **changes)).step()
    assert not widths
