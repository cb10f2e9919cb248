"""Muon and groups of weights on every layout that they allow, held against one plain process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.specs.model import GPT
from tests.support.layouts import more_tokens, tokens
from tests.support.snapshots import loaded, read
from tests.support.team import Team, batch
from tests.support.thread_jobs import TeamJob

MODEL = GPT(layers=4, hidden=16, heads=2, seq=8, vocab=11)
GROUPS = {"rates": {"*.attn.*": 0.5, "embed.*": 2.0}, "no_decay": ("embed.*", "*.up.*")}
OPTIMIZERS = {
    "muon": rp.Muon(lr=1e-2, adamw_lr=3e-3, warmup=1, decay="wsd", decay_steps=2, **GROUPS),
    "adamw": rp.AdamW(lr=1e-2, eps=1e-4, **GROUPS),
    "sgd": rp.SGD(lr=0.1, weight_decay=0.01, **GROUPS),
}


def run_of(optim, **changes):
    fields = {"model": MODEL, "data": rp.Batches(tokens), "microbatches": 2, "steps": 4, "timeout": 20.0}
    return rp.Run(optim=optim, **fields | changes)


def verdict_of(run):
    job = TeamJob(run)
    try:
        return rp.verify(run, job)
    finally:
        job.close()


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("optim", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("mesh", [rp.Mesh(pp=2), rp.Mesh(dp=2)])
def test_pipelines_and_two_replicas_have_the_bits_of_one_process(optim, mesh):
    """With two microbatches in all there is one addition, and ZeRO-1 owns matrices whole."""
    verdict = verdict_of(run_of(optim, mesh=mesh, microbatches=2 // mesh.dp))
    assert verdict.bitwise, str(verdict)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": rp.Mesh(dp=2), "microbatches": 4},
        pytest.param(
            {"mesh": rp.Mesh(dp=2), "microbatches": 4, "data_parallel": "parameter_server", "servers": 2},
            marks=pytest.mark.long,
        ),
        {"mesh": rp.Mesh(pp=2, cp=2)},
        {"mesh": rp.Mesh(tp=2)},
        {"mesh": rp.Mesh(pp=2, dp=2, tp=2), "sequence_parallel": True, "zero": 1},
        {"mesh": rp.Mesh(tp=4), "model": rp.Llama(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, seq=8, vocab=11)},
        {"mesh": rp.Mesh(tp="2d:2x2"), "data": rp.Batches(more_tokens)},
        pytest.param({"mesh": rp.Mesh(tp="2.5d:2x2x2"), "data": rp.Batches(more_tokens)}, marks=pytest.mark.long),
        pytest.param({"mesh": rp.Mesh(tp="3d:2x2x2"), "data": rp.Batches(more_tokens)}, marks=pytest.mark.long),
        {"mesh": rp.Mesh(pp=2, dp=2), "model": GPT(layers=4, hidden=16, heads=2, seq=8, vocab=11, tied=True)},
    ],
    ids=["dp", "servers", "cp", "tp", "pp dp tp", "kv heads", "2d", "2.5d", "3d", "tied"],
)
def test_muon_agrees_with_one_process_where_sums_have_another_order(changes):
    optim = OPTIMIZERS["muon"]
    if changes.get("model", MODEL).tied:
        optim = rp.Muon(lr=1e-2, adamw_lr=3e-3, rates={"embed.tokens.*": 2.0, "head.out.*": 2.0})
    verdict = verdict_of(run_of(optim, **changes))
    assert verdict.ok, str(verdict)


def test_zero_changes_no_bit():
    """The same sums are updated in parts, or by all replicas."""
    outcomes = []
    for zero in (0, 1):
        team = Team.of(run_of(OPTIMIZERS["muon"], mesh=rp.Mesh(dp=2), zero=zero))
        for step in range(3):
            team.step(step)
        outcomes.append(team.weights(0))
    assert all(torch.equal(weight, outcomes[1][name]) for name, weight in outcomes[0].items())


def stacked():
    return [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)]


def test_own_layers_that_a_plan_divides():
    plan = {"layers.*.0": "column", "layers.*.2": "row"}
    model = rp.Layers(stacked, nn.functional.mse_loss, plan=plan)
    optim = rp.Muon(lr=1e-2, adamw=("layers.1.*",), rates={"layers.0.0.*": 0.5})
    verdict = verdict_of(run_of(optim, model=model, data=rp.Batches(batch), mesh=rp.Mesh(tp=2)))
    assert verdict.ok, str(verdict)


@pytest.mark.sampled
@pytest.mark.parametrize("there", [rp.Mesh(tp=2), rp.Mesh(pp=2, dp=2), rp.Mesh(tp="2d:2x2")])
def test_momentum_goes_from_one_layout_to_another(there, tmp_path):
    """What another layout has read, it writes again with the same bits."""
    run = run_of(OPTIMIZERS["muon"], mesh=rp.Mesh(tp=2, dp=2), data=rp.Batches(more_tokens))
    team = Team.of(run)
    team.step(0)
    mine, tensors = read(team, tmp_path / "mine")
    theirs, _ = read(loaded(Team.of(replace(run, mesh=there)), tmp_path / "mine", tensors), tmp_path / "theirs")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert mine["optim.blocks.0.mlp.up.weight.momentum_buffer"].shape == (64, 16)


@pytest.mark.long
def test_verify_compares_in_float32():
    """In bfloat16 an order of additions is seen in a percent of an update."""
    run = run_of(replace(OPTIMIZERS["muon"], precision="bf16"), mesh=rp.Mesh(dp=2), microbatches=4)
    verdict = verdict_of(run)
    assert verdict.ok, str(verdict)
    assert verdict.worst < 1e-4


@pytest.mark.long
def test_the_comparison_can_fail(monkeypatch):
    from raypar.parity import reference

    build = reference.build_optimizer
    monkeypatch.setattr(reference, "build_optimizer", lambda spec, weights: build(rp.Muon(lr=1e-2), weights))
    assert not verdict_of(run_of(OPTIMIZERS["muon"], mesh=rp.Mesh(dp=2), microbatches=4)).ok
