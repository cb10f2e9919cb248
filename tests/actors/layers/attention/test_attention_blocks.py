"""Causal attention in blocks of queries: what the core says op by op, and torch's kernel where blocks do not serve."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from raypar.actors.layers.attention import attention_blocks as causal
from raypar.actors.layers.attention.attention import Core
from raypar.actors.layers.positions import Alibi
from tests.support.causal import B, N, S, attend, d, one_thread, trained, values  # noqa: F401
from tests.support.counted import threads


def alike(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert torch.linalg.vector_norm(one - other) <= 1e-6 * torch.linalg.vector_norm(other)


@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 5),
    shared=st.integers(1, 3),
    seq=st.integers(1, 200),
    width=st.integers(1, 40),
    by_token=st.booleans(),
)
def test_it_is_what_the_core_says_op_by_op(batch, kv_heads, shared, seq, width, by_token):
    inputs = values(batch, kv_heads * shared, kv_heads, seq, width, by_token=by_token)
    exact = trained(Core("materialised", 0.0, None), [x.double() for x in inputs])
    alike([x.double() for x in trained(attend, inputs)], exact)


@pytest.mark.parametrize(("heads", "kv_heads", "seq"), [(8, 8, 256), (12, 4, 300), (7, 7, 513)])
def test_the_core_takes_blocks_and_the_same_bits_for_every_sample_with_gradients_or_without(heads, kv_heads, seq):
    inputs = values(3, heads, kv_heads, seq)
    core = Core("blocks", 0.0, None)
    made = trained(core, inputs)
    assert all(map(torch.equal, made, trained(attend, inputs)))
    alike(made, trained(Core("fused", 0.0, None), inputs))
    with torch.no_grad():
        assert torch.equal(core(*inputs), made[0])
        one = core(*(x[1:2] for x in inputs))
    assert torch.equal(one, made[0][1:2])


def test_nobody_sees_what_comes_later():
    q, k, v = (x.detach() for x in values())
    before = attend(q, k, v)
    for x in (q, k, v):
        x[:, :, 100:] = 7.0
    after = attend(q, k, v)
    assert torch.equal(after[:, :, :100], before[:, :, :100])
    assert not torch.equal(after[:, :, 100:], before[:, :, 100:])


def test_autograd_keeps_its_inputs_and_no_scores():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        attend(*values(seq=512))
    assert kept == [B * N * 512 * d] * 3
    assert not Core("blocks", 0.0, None).keeps_scores(*values())


def test_what_it_returns_lies_by_token_and_may_be_written_into():
    out = attend(*values())
    assert out.transpose(1, 2).is_contiguous()
    out.mul_(2).sum().backward()
    for x, gradient in zip(inputs := values(), torch.autograd.grad(attend(*inputs).sum(), inputs), strict=True):
        assert gradient.stride() == x.stride(), "no copy for a projection"


def test_run_again_by_torchs_checkpointing_it_is_the_same():
    inputs = values()
    again = trained(lambda *leaves: checkpoint(attend, *leaves, use_reentrant=False), inputs)
    assert all(map(torch.equal, again, trained(attend, inputs)))


def test_gradients_of_gradients_are_refused():
    q, k, v = values()
    with pytest.raises(RuntimeError, match="use attention='materialised'"):
        torch.autograd.grad(attend(q, k, v).sum(), q, create_graph=True)


@pytest.mark.parametrize(
    ("inputs", "around"),
    [
        (lambda: values(seq=255, heads=16), nullcontext),
        (lambda: values(heads=7), nullcontext),
        (lambda: values(dtype=torch.float64), nullcontext),
        (lambda: values(dtype=torch.bfloat16), nullcontext),
        (values, lambda: threads(2)),
        (values, lambda: torch.autocast("cpu", torch.bfloat16)),
        (values, lambda: FlopCounterMode(display=False)),
    ],
    ids=["short", "few", "float64", "bfloat16", "threads", "autocast", "counter"],
)
def test_what_blocks_do_not_serve_is_torchs_kernel(inputs, around):
    inputs = [x.detach() for x in inputs()]
    with around():
        assert not causal.suits_blocks(*inputs)
        assert torch.equal(Core("blocks", 0.0, None)(*inputs), Core("fused", 0.0, None)(*inputs))


def test_on_processors_of_intel_blocks_are_for_more(monkeypatch):
    few, more = (values(width=width) for width in (63, 64))  # 8 heads of 256 queries
    assert causal.suits_blocks(*few)
    monkeypatch.setattr(causal, "of_intel", lambda: True)
    assert not causal.suits_blocks(*few)
    assert causal.suits_blocks(*more)


def test_with_biases_or_dropout_it_is_torchs_kernel(monkeypatch):
    monkeypatch.setattr(causal, "attend", None)
    inputs = [x.detach() for x in values()]
    Core("blocks", 0.0, Alibi(N, S))(*inputs)
    Core("blocks", 0.5, None)(*inputs)


def test_vmap_and_compilation_see_torchs_kernel():
    inputs = [x.detach() for x in values()]
    core, fused = Core("blocks", 0.0, None), Core("fused", 0.0, None)
    rows = torch.vmap(lambda *one: core(*(x[None] for x in one))[0])(*inputs)
    torch.testing.assert_close(rows, fused(*inputs))
    torch.testing.assert_close(torch.compile(core, backend="eager", fullgraph=True)(*inputs), fused(*inputs))
