"""Token slices: a microbatch in slices along its sequence has the numbers of the whole one, on every layout."""

from __future__ import annotations

import pytest
import torch

import raypar as rp
from raypar.actors.layers.attention.attention import Core
from raypar.actors.layers.attention.token_slices import Slice, TokenSlices
from raypar.actors.layers.positions import Alibi
from tests.support.replicas import agrees
from tests.support.schedules import ONE_ROW_A_RANK
from tests.support.team import Team

SIZES = {"layers": 4, "hidden": 16, "heads": 4, "seq": 12, "vocab": 256}
CLOSE = 1e-6


def team_of(model=None, pp=2, m=2, schedule="1f1b", slices=3, steps=2, **changes):
    fields = {"model": model or rp.GPT(**SIZES), "data": rp.Text(), "token_slices": slices, "steps": steps}
    mesh = {name: changes.pop(name) for name in ("dp", "tp", "cp") if name in changes}
    fields |= {"mesh": rp.Mesh(pp=pp, **mesh), "microbatches": m, "schedule": schedule, "optim": rp.SGD(lr=0.1)}
    return Team.of(rp.Run(**fields | {"clip": None, "timeout": 10.0} | changes))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ONE_ROW_A_RANK)
def test_every_schedule_in_slices_has_the_numbers_of_whole_sequences(name):
    backward = ("whole", "auto", "split")[ONE_ROW_A_RANK.index(name) % 3]
    agrees(team_of(schedule=name, backward=backward), bound=CLOSE)


MODELS = {
    "llama": rp.Llama(**SIZES, kv_heads=2),
    "qk_norm": rp.Llama(**SIZES, kv_heads=1, qk_norm=True),
    "alibi": rp.GPT(**SIZES, positions="alibi"),
    "sinusoidal": rp.GPT(**SIZES, positions="sinusoidal"),
    "hierarchical": rp.GPT(**SIZES, positions="hierarchical"),
    "window": rp.Llama(**SIZES, window=5),
    "materialised": rp.GPT(**SIZES, attention="materialised"),
    "tied": rp.GPT(**SIZES, tied=True),
    "gemma": rp.Llama(
        **SIZES, kv_heads=2, post_norms=True, scaled_embedding=True, query_scale=3.0, attention="materialised",
        attention_cap=0.1, logit_cap=2.0, window=5, window_skips=2,
    ),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_dense_attention(name):
    agrees(team_of(MODELS[name], slices=4), bound=CLOSE)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": "full"},
        {"recompute": "selective", "model": MODELS["materialised"]},
        {"recompute": ("full", "none", "full", "none")},
        {"dp": 2},
        {"dp": 2, "zero": 3, "pp": 1},
        {"offload": "parameters"},
    ],
    ids=str,
)
def test_slices_combine_with(changes):
    agrees(team_of(**changes), bound=CLOSE)


@pytest.mark.parametrize("changes", [{}, {"sequence_parallel": True}], ids=str)
def test_slices_combine_with_tensor_parallelism(changes):
    agrees(team_of(tp=2, slices=2, **changes), bound=2e-5)


def test_an_evaluation_in_slices_has_the_loss_of_whole_sequences():
    losses = [team_of(slices=count).step(program="evaluate") for count in (1, 3)]
    means = [
        sum(loss * count for one in results for loss, count in zip(one.losses, one.counts, strict=True))
        / sum(sum(one.counts) for one in results)
        for results in losses
    ]
    assert means[1] == pytest.approx(means[0], rel=1e-6)


def test_actors_hold_no_more_slices_than_the_schedule_says_and_nothing_stays():
    team = team_of(pp=2, m=3, slices=4)
    results = team.step()
    assert [result.in_flight for result in results] == [2 + 3, 1 + 3]
    for worker in team.workers:
        assert not worker.member.parts.part.model.slices._kept, "keys and values are let go"
    team.step(program="evaluate")
    assert not any(worker.member.parts.part.model.slices._kept for worker in team.workers)


@pytest.mark.parametrize("alibi", [None, Alibi(4, 12)], ids=["plain", "alibi"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_attention_of_slices_has_the_gradients_of_the_whole(alibi, recomputes):
    core = Core("fused", 0.0, alibi)
    core.recomputes = recomputes
    draw = torch.Generator().manual_seed(1)
    whole = [torch.randn(2, heads, 12, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2)]
    given = torch.randn(2, 4, 12, 8, generator=draw, dtype=torch.float64)
    for one in whole:
        one.requires_grad_()
    wanted = core.attend(*whole, None)
    gradients = torch.autograd.grad(wanted, whole, given)
    slices, parts, made = TokenSlices(), [], []
    for index in range(3):
        slices.now = Slice((0, 0, 0), index, 3)
        at = slice(4 * index, 4 * index + 4)
        parts.append([one.detach()[:, :, at].requires_grad_() for one in whole])
        made.append(slices.attend(core, *parts[-1]))
    assert torch.allclose(torch.cat(made, 2), wanted, rtol=1e-12, atol=1e-12)
    for index in (2, 1, 0):
        at = slice(4 * index, 4 * index + 4)
        found = torch.autograd.grad(made[index], parts[index], given[:, :, at])
        for one, own in zip(gradients, found, strict=True):
            assert torch.allclose(own, one[:, :, at], rtol=1e-12, atol=1e-12)
    assert not slices._kept


FAULTS = {
    "layers": (
        {"model": rp.Layers(lambda: [torch.nn.Linear(2, 2)], torch.nn.functional.mse_loss)},
        "own layers compute",
    ),
    "seq": ({"token_slices": 5}, "model.seq is 12: set token_slices to 4 or 6"),
    "dropout": ({"model": rp.GPT(**SIZES, dropout=0.1)}, "set model.dropout to 0"),
    "moe": ({"model": rp.GPT(**SIZES, moe=rp.MoE(experts=2))}, "set model.moe to None"),
    "cp": ({"mesh": rp.Mesh(pp=1, cp=2)}, "with mesh.cp actors hold parts of a sequence"),
    "replicas": ({"mesh": rp.Mesh(pp=2, rank_dp=(2, 1))}, "would take slices in turn"),
    "flush_every": ({"schedule": "zb-h2", "flush_every": 2}, "one stream of whole microbatches"),
    "stream": ({"schedule": "pipedream"}, "not the compute actions of one synchronous step"),
    "compile": ({"compile": True}, "set compile to False"),
    "varying": ({"data": rp.Batches(lambda *_: None, varying=True)}, "set data.varying to False"),
    "sequence": ({"mesh": rp.Mesh(pp=1, tp=2), "sequence_parallel": True, "token_slices": 4}, "a slice has 3 tokens"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_can_not_be_cut_is_told(name):
    changes, told = FAULTS[name]
    fields = {"model": rp.GPT(**SIZES), "mesh": rp.Mesh(pp=2), "token_slices": 3, "microbatches": 2, "clip": None}
    assert told in "\n".join(rp.faults(rp.Run(**fields | changes)))


def test_a_schedule_of_slices_that_can_not_be_cut_is_not_made(monkeypatch):
    """With 100,000 slices it took minutes until that was told."""
    cut = []
    monkeypatch.setattr("raypar.config.schedule.with_slices", lambda *told: cut.append(told))
    for changes in ({"token_slices": 100_000}, {"mesh": rp.Mesh(pp=2, rank_dp=(2, 2)), "schedule": "dualpipe"}):
        fields = {"model": rp.GPT(**SIZES), "mesh": rp.Mesh(pp=2), "token_slices": 3, "microbatches": 8}
        assert len(rp.faults(rp.Run(**fields | changes))) == 1
    assert not cut
