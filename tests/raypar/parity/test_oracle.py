"""Runs on threads against the oracle, which shares no code with raypar: models, losses, optimizers, stale weights."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.errors import ActionError
from tests.oracle.training import Loss
from tests.support.examples import made_jsonl
from tests.support.oracle_runs import differences
from tests.support.team import Team
from tests.support.uneven_runs import gpt, llama, run_of, uneven

ORACLE = Path(__file__).parents[2] / "oracle"


def scaling(kind, **fields):
    return rp.RopeScaling(kind=kind, factor=2.5, trained=5, **fields)


MODELS = {
    "gpt": gpt(),
    "tied": gpt(tied=True, gelu="tanh", qkv_bias=True),
    "sinusoidal": gpt(positions="sinusoidal", mlp=3),
    "hierarchical": gpt(positions="hierarchical"),
    "alibi": gpt(positions="alibi", heads=3, hidden=15),
    "window": gpt(window=3, window_first=1, layers=3),
    "llama": llama(kv_heads=2),
    "one kv head": llama(kv_heads=1, qk_norm=True, ffn=13, head_width=6),
    "gemma": llama(
        post_norms=True, scaled_embedding=True, query_scale=7.0, attention_cap=2.0, logit_cap=3.0, tied=True,
        gate="gelu_tanh", attention="materialised", window=2, window_skips=2,
    ),
    "linear": llama(rope_scaling=scaling("linear")),
    "dynamic": llama(rope_scaling=scaling("dynamic")),
    "yarn": llama(rope_scaling=scaling("yarn", fast=2.0, slow=0.1), gate="gelu"),
    "llama3": llama(rope_scaling=scaling("llama3", low=0.2, high=0.6), rope_base=50.0),
    "experts": gpt(moe=rp.MoE(experts=4, alpha=0.3, z_loss=0.02, capacity=1.2)),
    "sigmoid": llama(moe=rp.MoE(experts=4, gate="sigmoid", groups=2, shared=1, alpha=0.3, every=2)),
    "bias": gpt(moe=rp.MoE(experts=4, gate="sigmoid", bias_rate=0.05, loss="none")),
    "joint": gpt(layers=3, moe=rp.MoE(experts=4, alpha=0.3, loss="joint", z_loss=0.01)),
    "adapters": llama(lora=rp.Lora(rank=3, alpha=5.0)),
    "residual": llama(moe=rp.MoE(experts=(3, 5), gate="switch", top_k=1, residual=True, loss="gshard", alpha=0.4)),
}  # fmt: skip


def test_the_oracle_imports_nothing_of_raypar():
    for path in ORACLE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            others = {name.split(".")[0] for name in names} - {"tests", "torch", "math", "typing", "collections"}
            assert others <= {"__future__", "dataclasses", "fnmatch"}, (path.name, names)
            assert all(name.startswith("tests.oracle") for name in names if name.startswith("tests")), path.name


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_one_actor_learns_what_the_papers_say(name):
    assert not differences(run_of(MODELS[name]))


OPTIMIZERS = {
    "momentum": {"optim": rp.SGD(lr=0.1, momentum=0.8, weight_decay=0.1, warmup=2, decay="cosine")},
    "adamw": {"optim": rp.AdamW(lr=1e-2, warmup=1, decay="linear", rates={"head.*": 0.5}), "clip": 0.5},
    "averages": {"optim": rp.AdamW(lr=1e-2), "ema": 0.7},
    "muon": {"optim": rp.Muon(lr=1e-2, decay="wsd", decay_steps=2, adamw_lr=3e-3, no_decay=("embed.*",))},
    "original": {"optim": rp.Muon(lr=1e-2, scale="original", nesterov=False, iterations=4), "clip": 0.3},
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_makes_the_updates_of_its_paper(name):
    assert not differences(run_of(gpt(), **OPTIMIZERS[name]))


# --- counts of targets that are not equal ----------------------------------------------------------------------------


def test_replicas_that_are_flushed_correct_by_the_targets_of_all():
    run = run_of(gpt(), mesh=rp.Mesh(pp=2, dp=2), zero=0, flush_every=2)
    assert not differences(run, steps=4)


@pytest.mark.long
@pytest.mark.parametrize("name", ["experts", "sigmoid", "residual"])
def test_auxiliary_losses_weigh_the_same_whatever_counts(name):
    assert not differences(run_of(MODELS[name], mesh=rp.Mesh(pp=2, dp=2)))


JOINT = {
    "order of microbatches": {"schedule": "gpipe"},
    "recomputed": {"schedule": "gpipe", "recompute": "full", "mesh": rp.Mesh(dp=2)},
    "sequences divided": {"mesh": rp.Mesh(cp=2), "context": "ring"},
    "tokens divided": {"mesh": rp.Mesh(tp=2), "sequence_parallel": True},
    "experts divided": {"mesh": rp.Mesh(dp=2, ep=2)},
    "backwards in halves": {"schedule": "zb-h1"},
}


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("layout", JOINT)
def test_one_loss_over_the_experts_of_all_layers(layout):
    """With padding; each layer's gradient has the choices of all layers."""
    data = rp.Batches(with_padding, lengths=lambda x, y: (x != 0).sum(1))
    run = replace(run_of(MODELS["joint"], **JOINT[layout]), data=data)
    assert not rp.faults(run)
    assert not differences(run, padding=0)


def with_padding(step, microbatch, dp):
    x, y = uneven(step, microbatch, dp)
    x = x.clamp(min=1)
    x[0, 5:], y[0, 5:] = 0, -100
    return x, y


def test_one_loss_over_all_layers_needs_them_on_one_actor():
    (fault,) = rp.faults(run_of(MODELS["joint"], mesh=rp.Mesh(pp=2)))
    assert "set it to 'switch', with moe.alpha 0.2 for the same strength at an even load, or mesh.pp to 1" in fault


def test_a_replica_that_is_gone_when_targets_are_counted_is_named():
    team = Team.of(run_of(MODELS["experts"], mesh=rp.Mesh(dp=2)))
    team.each(lambda actor: actor.train(0))
    for group in team.all[1].member.context.groups.values():
        group.abort()
    with pytest.raises(ActionError, match="actor pp=0 dp=0: action beginning of step with pp=0 dp=1 failed: "):
        team.all[0].train(1)


# --- weights that are some steps old ---------------------------------------------------------------------------------

DELAYS = {
    "even": {"mesh": rp.Mesh(pp=2)},
    "replicas": {"mesh": rp.Mesh(pp=2, dp=2), "zero": 0},
    "unequal replicas": {"mesh": rp.Mesh(pp=2, rank_dp=(2, 1)), "zero": 0},
}


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", DELAYS)
@pytest.mark.parametrize("delay_feedback", [False, True], ids=["as they are", "feedback"])
def test_stale_gradients_and_their_norms(mesh, delay_feedback):
    """PipeDream-2BW computes step t with the weights of step t - 1; norms are those of its gradients."""
    settings = {"schedule": "pipedream-2bw", "flush_every": 4, "data": rp.Batches(all_count)}
    run = run_of(gpt(), delay_feedback=delay_feedback, **settings, **DELAYS[mesh])
    assert not differences(run, 4, version=lambda name, t: max(0, t - 1), delay_feedback=delay_feedback)


def all_count(step, microbatch, dp):
    x, _ = uneven(step, microbatch, dp)
    return x, x.roll(1, 1)


# --- tokens on several actors ----------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("context", ["ring", "all_gather", "ulysses", "rsa"])
def test_rotated_heads_of_width_2_over_cp(context):
    model = llama(layers=1, hidden=8, vocab=23, ffn=24)
    settings = {"mesh": rp.Mesh(cp=2), "context": context, "data": rp.Batches(of_23)}
    assert not differences(run_of(model, **settings))


def of_23(step, microbatch, dp):
    x, y = uneven(step, microbatch, dp)
    return x % 23, torch.where(y < 0, y, y % 23)


# --- a model whose linear layers are cut into tiles is the same model ------------------------------------------------


@pytest.fixture
def packed(tmp_path):
    """Prompts and answers of unequal lengths, several in a sequence."""
    lengths = [3, 5, 2, 9, 4, 7, 1, 6, 8, 2, 5, 3] * 3
    records = [{"prompt": "abcdefgh"[: n % 4 + 1], "completion": "zyxwvutsrq"[:n]} for n in lengths]
    return rp.Examples(str(made_jsonl(tmp_path / "examples.jsonl", records)), cache=str(tmp_path / "cache"))


@pytest.mark.sampled
@pytest.mark.parametrize("tile", [1, 2], ids=["whole", "tiled"])
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_documents_of_a_sequence_do_not_attend_to_each_other(packed, tile, positions):
    model = llama(vocab=256, seq=16, positions=positions, ffn=24)
    assert not differences(run_of(model, data=packed, mesh=rp.Mesh(dp=2), zero=3, tile=tile))


@pytest.mark.sampled
@pytest.mark.parametrize("tile", [1, 2], ids=["whole", "tiled"])
def test_slices_of_sequences_are_whole_sequences(tile):
    settings = {"mesh": rp.Mesh(pp=2, dp=2), "zero": 3, "token_slices": 2, "schedule": "1f1b"}
    assert not differences(run_of(gpt(vocab=30), tile=tile, **settings))


@pytest.mark.parametrize("tile", [1, 2], ids=["whole", "tiled"])
def test_skips_reach_the_layer_that_they_lead_to(tile):
    def net():
        return [nn.Linear(4, 4), nn.Linear(4, 6), Adds(6), nn.Linear(6, 4)]

    def data(step, microbatch, dp):
        generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + dp)
        x = torch.randn(3, 4, generator=generator)
        return x, x.cos()

    def loss(weights, batch):
        y = batch.inputs
        kept = y @ weights["layers.0.weight"].T + weights["layers.0.bias"]
        y = kept @ weights["layers.1.weight"].T + weights["layers.1.bias"]
        y = torch.sin(y @ weights["layers.2.inner.weight"].T + weights["layers.2.inner.bias"])
        y = y + torch.cat((kept, kept[:, :2]), 1)
        y = y @ weights["layers.3.weight"].T + weights["layers.3.bias"]
        return Loss(((y - batch.targets) ** 2).sum(), batch.targets.numel(), torch.zeros(()), {})

    model = rp.Layers(net, nn.functional.mse_loss, skips=((0, 2),))
    run = run_of(model, data=rp.Batches(data), mesh=rp.Mesh(pp=2, dp=2), zero=3, tile=tile)
    assert not differences(run, model=loss)


class Adds(nn.Module):
    """A layer that adds what a skip brings."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x, skipped):
        return self.inner(x).sin() + torch.cat((skipped, skipped[:, :2]), 1)
