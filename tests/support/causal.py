"""Inputs and gradients of causal attention."""

from __future__ import annotations

import pytest
import torch

from raypar.actors.layers.attention import attention_blocks as causal
from raypar.actors.layers.attention.attention_scratch import ScratchAllocator
from tests.support.counted import threads

B, N, S, d = 2, 8, 256, 16  # as few queries as blocks are for


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(causal, "of_intel", lambda: False)
    with threads(1):
        yield


def values(batch=B, heads=N, kv_heads=None, seq=S, width=d, dtype=torch.float32, by_token=True):
    """Queries, keys and values, laid out as projections leave them, or head by head."""
    generator = torch.Generator().manual_seed(heads + seq)
    made = []
    for count in (heads, kv_heads or heads, kv_heads or heads):
        x = torch.randn(batch, seq, count, width, generator=generator).to(dtype).transpose(1, 2)
        made.append((x if by_token else x.contiguous()).requires_grad_())
    return made


def trained(attend, inputs):
    """What it makes of inputs, and their gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out.shape, generator=generator).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def attend(q, k, v, room=0):
    """In blocks, with room for so many bytes of scores."""
    return causal.attend(q, k, v, ScratchAllocator(room))
