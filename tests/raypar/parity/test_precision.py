"""verify in half precision: bitwise where the order of additions is the same, else within the bounds that it states."""

from __future__ import annotations

import pytest

import raypar as rp
from raypar.parity.verify import HALF
from tests.support.layouts import verdict_of

GPT = rp.GPT(layers=2, hidden=32, heads=2, seq=16, dropout=0.0)
LLAMA = rp.Llama(layers=2, hidden=32, heads=2, kv_heads=1, seq=16, dropout=0.0)


def verdict(model, sizes, compute="bf16", **fields):
    run = rp.Run(model=model, mesh=rp.Mesh(**sizes), precision=rp.Precision(compute), steps=2, timeout=20.0, **fields)
    return verdict_of(run)


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("fields", [{}, {"recompute": "full"}, {"backward": "split"}], ids=str)
def test_a_pipeline_has_the_bits_of_one_process(model, fields):
    assert verdict(model, {"pp": 2}, **fields).bitwise


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_other_layouts_agree_within_bounds(model, sizes):
    found = verdict(model, sizes)
    assert found.ok, found
    assert found.bounds == HALF


def test_fp16_agrees_too():
    found = verdict(GPT, {"tp": 2, "dp": 2}, "fp16")
    assert found.ok, found


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 4, "shard": 2}], ids=str)
def test_sharded_gradients_agree_too(sizes):
    found = verdict(GPT, sizes, zero=2)
    assert found.ok, found
