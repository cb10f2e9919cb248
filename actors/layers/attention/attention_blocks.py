"""Causal attention on a CPU from torch's batched matrix products, one block of queries at a time.

A block computes no scores for later tokens, except within its own tokens.

Shapes: B microbatch, S sequence, N query heads, K heads of keys and values, d width of a head, R = N/K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from raypar.actors.layers.attention.attention_scratch import HeadGroup, Heads, ScratchAllocator, Size
from raypar.actors.layers.linear import of_intel, undisturbed
from raypar.actors.specs.model import BLOCKS_FROM_QUERIES, BLOCKS_FROM_TOKENS

# Scores in a block, 512 KiB. A backward uses two such tensors (softmax and its gradient), which fit in 1 MiB of cache.
_BLOCK_SCORES = 1 << 17
_OF_INTEL = 1 << 17  # elements of a sample's queries, below which torch's own kernel is faster on Intel processors


def suits_blocks(q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> bool:
    """Return whether ``attend`` supports these tensors and is faster than torch's kernel.

    It supports self-attention in float32 on one thread of a CPU, and is faster for large enough tensors.

    Args:
        q_BNSd: Queries.
        k_BKSd: Keys.
        v_BKSd: Values.
    """
    return (
        q_BNSd.shape[2] == k_BKSd.shape[2] >= BLOCKS_FROM_TOKENS
        and q_BNSd.shape[1] * q_BNSd.shape[2] >= BLOCKS_FROM_QUERIES
        and all(x.dtype == torch.float32 and x.device.type == "cpu" for x in (q_BNSd, k_BKSd, v_BKSd))
        and undisturbed(q_BNSd)
        and (math.prod(q_BNSd.shape[1:]) >= _OF_INTEL or not of_intel())
        and torch.get_num_threads() == 1
        and torch.backends.mkl.is_available()
    )


def attend(q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, scratch: ScratchAllocator) -> Tensor:
    """Compute causal attention, softmax(q k^T / sqrt(d)) v, block by block.

    The softmax is kept for the backward within the scratch memory's budget. The backward recomputes the rest, block by
    block, as torch's kernel does.

    Args:
        q_BNSd: Queries, float32.
        k_BKSd: Keys, float32.
        v_BKSd: Values, float32.
        scratch: Scratch memory, and the budget for kept softmaxes.

    Returns:
        (B, N, S, d), laid out in memory as (B, S, N, d): the output projection reads all heads of a token together.

    Raises:
        RuntimeError: In the backward, if gradients of gradients are wanted.

    Source: Dao et al. 2022, "FlashAttention", section 3.1.
    """
    out: Tensor = _Causal.apply(q_BNSd, k_BKSd, v_BKSd, scratch)  # type: ignore[no-untyped-call]
    return out


class _Causal(torch.autograd.Function):
    """The autograd function of ``attend``."""

    @staticmethod
    def forward(ctx: Any, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, scratch: ScratchAllocator) -> Tensor:
        """Compute the output (B, N, S, d), and keep the softmax of as many heads as the budget allows."""
        ctx.save_for_backward(q_BNSd, k_BKSd, v_BKSd)
        ctx.scratch, ctx.kept = scratch, []
        seen_BNSd = _by_token(q_BNSd)
        groups, size = _some_heads(q_BNSd, k_BKSd)
        waits = any(ctx.needs_input_grad)
        with scratch.working(q_BNSd, size) as near:
            inputs = _grouped((near.q, near.k, near.v), (q_BNSd, k_BKSd, v_BKSd))
            seen = near.made.grouped(seen_BNSd)
            for group in groups:
                for heads, x_BKSRd in inputs:
                    heads.fetch(x_BKSRd, group)
                kept = scratch.softmax(q_BNSd, size) if waits else None
                for i, block in enumerate(near.blocks):
                    block.look(kept.scores[i] if kept else block.scores)
                near.made.put_back(seen, group)
                ctx.kept.append(kept)
        return seen_BNSd

    @staticmethod
    def backward(ctx: Any, gradient_BNSd: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of q, k and v. Raises RuntimeError if gradients of gradients are wanted."""
        if torch.is_grad_enabled():  # a second differentiation would take these gradients for constants
            raise RuntimeError("attention in blocks has no gradients of gradients: use attention='materialised'")
        saved = ctx.saved_tensors
        gradients = _gradients_of(saved)
        groups, size = _some_heads(*saved[:2])
        every, ctx.kept = ctx.kept, [None] * len(groups)  # a second backward of a retained graph recomputes
        with ctx.scratch.working(saved[0], size) as near:
            inputs = _grouped((near.q, near.k, near.v, near.gradient), (*saved, gradient_BNSd))
            results = _grouped((near.made, near.dk, near.dv), gradients)
            for group, kept in zip(groups, every, strict=True):
                for heads, x_BKSRd in inputs:
                    heads.fetch(x_BKSRd, group)
                for i, block in reversed(list(enumerate(near.blocks))):  # the last one sees all keys: sets dk, dv
                    block.back(kept.scores[i].whole if kept else block.weights(block.scores))
                for heads, x_BKSRd in results:
                    heads.put_back(x_BKSRd, group)
                if kept:
                    ctx.scratch.free(kept)
        return *gradients, None


def _grouped(copies: Sequence[Heads], tensors: Sequence[Tensor]) -> list[tuple[Heads, Tensor]]:
    """Return each copy of some heads with the view of its tensor that ``fetch`` and ``put_back`` take."""
    return [(heads, heads.grouped(x)) for heads, x in zip(copies, tensors, strict=True)]


def _some_heads(q_BNSd: Tensor, k_BKSd: Tensor) -> tuple[list[HeadGroup], Size]:
    """Plan in which groups of heads the work is done, so that a block's scores fit in the cache.

    Returns:
        For each group, the sample and the slice of its heads of keys; and the size of a group. The number of heads in
        a group is a divisor of K.
    """
    (B, N, S, d), K = q_BNSd.shape, k_BKSd.shape[1]
    most = max(1.0, 1.5 * _BLOCK_SCORES / max(Size(1, S, N // K, d).scores))
    n = max(n for n in range(1, K + 1) if K % n == 0 and n <= most)
    return [(b, slice(first, first + n)) for b in range(B) for first in range(0, K, n)], Size(n, S, N // K, d)


def _gradients_of(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Allocate gradients for q, k and v, each laid out in memory as (B, S, heads, d).

    If q, k and v are columns of one tensor (B, S, all heads x d), as one product of their projections makes them, the
    gradients are columns of one tensor too: the backward of the projections is then also one product.
    """
    B, _, S, d = values[0].shape
    heads = [x.shape[1] for x in values]
    starts = [x.storage_offset() - values[0].storage_offset() for x in values]
    of_columns = (S * sum(heads) * d, d, sum(heads) * d, 1)
    side_by_side = starts == [d * before for before in accumulate(heads[:-1], initial=0)]
    if not side_by_side or any(x.stride() != of_columns for x in values):
        return tuple(map(_by_token, values))
    whole = values[0].new_empty(B * of_columns[0])
    return tuple([whole.as_strided(x.shape, of_columns, start) for x, start in zip(values, starts, strict=True)])


def _by_token(like_BNSd: Tensor) -> Tensor:
    """Allocate a tensor (B, N, S, d) that is laid out in memory as (B, S, N, d)."""
    B, N, S, d = like_BNSd.shape
    return like_BNSd.new_empty_strided((B, N, S, d), (S * N * d, d, N * d, 1))
