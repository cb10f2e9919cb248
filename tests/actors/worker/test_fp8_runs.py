"""Teams with products in fp8: the numbers of one plain process in every layout, and the messages of bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest

import raypar as rp
from raypar.actors.specs.results import losses_of, mean_loss
from raypar.parity.reference import train_plainly
from raypar.parity.verify import FP8, HALF
from tests.support.layouts import verdict_of
from tests.support.team import Team

GPT = rp.GPT(layers=2, hidden=32, heads=2, seq=16, dropout=0.0)
LLAMA = rp.Llama(layers=2, hidden=64, heads=4, kv_heads=1, ffn=96, seq=16, dropout=0.0)
TINY = rp.Run(model=GPT, microbatches=2, steps=2, timeout=20.0, precision=rp.Precision("fp8"))
BITWISE = {
    "pp, W later": {"mesh": rp.Mesh(pp=2), "schedule": "zb-h1", "model": LLAMA},
    "pp, recomputed": {"mesh": rp.Mesh(pp=2), "recompute": "full"},
    "dp, zero 3": {"mesh": rp.Mesh(dp=2), "microbatches": 1, "zero": 3},
    "pp, adapters": {"mesh": rp.Mesh(pp=2), "model": replace(GPT, lora=rp.Lora(rank=4))},
    "pp, experts": {"mesh": rp.Mesh(pp=2), "model": replace(GPT, moe=rp.MoE(experts=2, top_k=1))},
}
CLOSE = {
    "tp, sequence": {"mesh": rp.Mesh(tp=2), "sequence_parallel": True, "model": LLAMA},
    "tp, pp, W later": {"mesh": rp.Mesh(tp=2, pp=2), "schedule": "zb-h1", "sequence_parallel": True},
    "tp, adapters": {"mesh": rp.Mesh(tp=2), "model": replace(GPT, lora=rp.Lora(rank=4))},
    "cp": {"mesh": rp.Mesh(cp=2)},
    "ep": {"mesh": rp.Mesh(dp=2, ep=2), "model": replace(GPT, moe=rp.MoE(experts=2, top_k=1))},
    "dp, four microbatches": {"mesh": rp.Mesh(dp=2), "zero": 2},
}


@pytest.mark.parametrize("layout", BITWISE)
def test_the_same_products_have_the_bits_of_one_process(layout):
    assert verdict_of(replace(TINY, **BITWISE[layout])).bitwise


@pytest.mark.parametrize("layout", CLOSE)
def test_other_layouts_agree_within_bounds(layout):
    found = verdict_of(replace(TINY, **CLOSE[layout]))
    assert found.ok, found
    assert found.bounds == FP8
    assert max(FP8) <= 0.5 < 1.0, "a factor of two is beyond them"


def test_verify_sees_a_scale_that_one_actor_forgets(monkeypatch):
    from raypar.actors.layers import fp8

    rounded, run = fp8.rounded, replace(TINY, mesh=rp.Mesh(tp=2))
    monkeypatch.setattr(fp8, "rounded", lambda rows: rounded(rows) * (2.0 if rows.shape[-1] == 64 else 1.0))
    found = verdict_of(run)  # the rows of half of the MLP, which the plain process has whole
    assert not found.ok


def test_fp8_trains_as_bf16_does_and_is_not_bf16():
    long = replace(TINY, steps=8, optim=rp.AdamW(lr=2e-3))
    ours, bf16 = (train_plainly(run).losses for run in (long, replace(long, precision=rp.Precision("bf16"))))
    assert ours == pytest.approx(bf16, rel=5e-3)
    assert ours[-1] < 0.99 * ours[0]
    assert ours != bf16


def sent(run):
    """Of each actor, the number of calls and of bytes, by axis and operation."""
    team = Team.of(run)
    team.step()
    assert mean_loss(*losses_of(team.step(1))) is not None
    ledgers = [actor.member.probe.ledger() for actor in team.all]
    return [{key: (calls, count) for key, (calls, count, _) in ledger.items()} for ledger in ledgers]


@pytest.mark.parametrize("layout", ["tp, pp, W later", "dp, four microbatches"])
def test_the_messages_are_those_of_bf16(layout):
    run = replace(TINY, **CLOSE[layout])
    assert sent(run) == sent(replace(run, precision=rp.Precision("bf16")))


def test_the_weights_have_the_bytes_of_bf16_and_fp32_masters():
    held = []
    for compute in ("fp8", "bf16"):
        team = Team.of(replace(TINY, precision=rp.Precision(compute)))
        team.step()
        held.append([actor.member.probe.memory() for actor in team.all])
    ours, bf16 = ([{name: one[name] for name in ("weights", "optimizer")} for one in each] for each in held)
    assert ours == bf16


def test_the_bounds_of_bf16_are_not_wider():
    assert all(one <= other for one, other in zip(HALF, FP8, strict=True))
