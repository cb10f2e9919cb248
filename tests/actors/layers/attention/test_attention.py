"""The core of attention, fused and op by op: the same numbers, from as many heads of keys as there are."""

from __future__ import annotations

import pytest
import torch

from raypar.actors.layers.attention import attention
from raypar.actors.layers.attention.attention import Core
from raypar.actors.layers.positions import Alibi


def values(heads, kv_heads, seq=5, width=6):
    generator = torch.Generator().manual_seed(heads)
    shapes = [(2, n, seq, width) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]


def one_by_one(q, k, v, alibi):
    """Row by row, head by head."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for n in range(q.shape[1]):
            for i in range(q.shape[2]):
                scores = k[b, n // group, : i + 1] @ q[b, n, i] / q.shape[3] ** 0.5
                if alibi is not None:
                    scores = scores - alibi.slopes[n] * (i - torch.arange(i + 1))
                out[b, n, i] = scores.softmax(0) @ v[b, n // group, : i + 1]
    return out


@pytest.mark.parametrize("kind", ["fused", "materialised"])
@pytest.mark.parametrize("with_alibi", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_the_core_is_what_it_says(kind, with_alibi, heads, kv_heads):
    alibi = Alibi(heads, 8) if with_alibi else None
    q, k, v = values(heads, kv_heads)
    y, wanted = Core(kind, 0.0, alibi)(q, k, v), one_by_one(q, k, v, alibi)
    torch.testing.assert_close(y, wanted)
    weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(9))
    for ours, theirs in zip(
        torch.autograd.grad((y * weight).sum(), (q, k, v)),
        torch.autograd.grad((wanted * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["fused", "materialised"])
def test_dropout_drops_in_training_only_and_keeps_the_mean(kind):
    q, k, v = (x.detach() for x in values(2, 1))
    core, whole = Core(kind, 0.5, None), Core(kind, 0.0, None)(q, k, v)
    torch.manual_seed(0)
    many = core(*(x.repeat(2000, 1, 1, 1) for x in (q, k, v)))
    mean = many.unflatten(0, (2000, 2)).mean(0)
    assert not torch.equal(core(q, k, v), whole)
    assert (mean - whole).abs().max() < 0.2
    assert torch.equal(core.eval()(q, k, v), whole)


@pytest.mark.parametrize(("kind", "keeps"), [("blocks", True), ("fused", False)])
def test_with_dropout_a_gpu_computes_op_by_op_for_kernels_there_draw_masks_of_their_own(kind, keeps, monkeypatch):
    monkeypatch.setattr(attention, "keeps_attention_scores", lambda *inputs, **settings: False)
    inputs = [torch.empty(1, 2, 8, 4, device="meta")] * 3
    assert Core(kind, 0.5, None).keeps_scores(*inputs) is keeps
    assert not Core(kind, 0.5, None).eval().keeps_scores(*inputs)
