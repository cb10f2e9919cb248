"""Causal attention on a CPU out of torch's batched products: some queries at a time, with all keys that they see.

Shapes: B microbatch, S sequence, N heads of queries, K of keys and values, d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from raypar.actors.layers.attention_scratch import Desk, Place, Size
from raypar.actors.layers.linear import of_intel, undisturbed

_ROOM = 1 << 17  # scores of a block, of some heads: 512 KiB, half of a cache of which a backward needs two halves
_LEAST = 256  # tokens of a sequence, and
_ROWS = 2048  # queries of all heads: for fewer torch's kernel is the faster one
_OF_INTEL = 1 << 17  # numbers in them: for fewer it is that on Intel's processors


def serves(q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> bool:
    """Whether ``attend`` is for these, and the faster one: float32 on one thread of a CPU, and not too small."""
    return (
        q_BNSd.shape[2] == k_BKSd.shape[2] >= _LEAST
        and q_BNSd.shape[1] * q_BNSd.shape[2] >= _ROWS
        and all(x.dtype == torch.float32 and x.device.type == "cpu" for x in (q_BNSd, k_BKSd, v_BKSd))
        and undisturbed(q_BNSd)
        and (math.prod(q_BNSd.shape[1:]) >= _OF_INTEL or not of_intel())
        and torch.get_num_threads() == 1
        and torch.backends.mkl.is_available()
    )


def attend(q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, desk: Desk) -> Tensor:
    """Softmax(q k^T / sqrt(d)) v over what is not later: (B, N, S, d) and twice (B, K, S, d) -> (B, N, S, d).

    A backward makes the scores again, block by block, as torch's kernel does (Dao et al. 2022, "FlashAttention",
    section 3.1), but for those that the desk has room for. What it returns lies token by token, as a projection of all
    heads wants it.
    """
    out: Tensor = _Causal.apply(q_BNSd, k_BKSd, v_BKSd, desk)  # type: ignore[no-untyped-call]
    return out


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, desk: Desk) -> Tensor:
        """What the queries make of the values, block by block."""
        ctx.save_for_backward(q_BNSd, k_BKSd, v_BKSd)
        ctx.desk, ctx.kept = desk, []
        seen_BNSd = _by_token(q_BNSd)
        places, size = _some_heads(q_BNSd, k_BKSd)
        waits = any(ctx.needs_input_grad)
        with desk.scratch(q_BNSd, size) as near:
            q, k, v = near.q.grouped(q_BNSd), near.k.grouped(k_BKSd), near.v.grouped(v_BKSd)
            seen = near.made.grouped(seen_BNSd)
            for place in places:
                near.q.fetch(q, place)
                near.k.fetch(k, place)
                near.v.fetch(v, place)
                kept = desk.lend(q_BNSd, size) if waits else None
                for i, block in enumerate(near.blocks):
                    block.look(kept.scores[i] if kept else block.scores)
                near.made.put_back(seen, place)
                ctx.kept.append(kept)
        return seen_BNSd

    @staticmethod
    def backward(ctx: Any, gradient_BNSd: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of all three; RuntimeError where gradients of gradients are wanted."""
        if torch.is_grad_enabled():  # what follows would be a constant to who differentiates again
            raise RuntimeError("attention in blocks has no gradients of gradients: use attention='materialised'")
        q_BNSd, k_BKSd, v_BKSd = saved = ctx.saved_tensors
        dq_BNSd, dk_BKSd, dv_BKSd = _rooms(saved)
        places, size = _some_heads(q_BNSd, k_BKSd)
        every, ctx.kept = ctx.kept, [None] * len(places)  # another backward of a retained graph makes them again
        with ctx.desk.scratch(q_BNSd, size) as near:
            q, k, v = near.q.grouped(q_BNSd), near.k.grouped(k_BKSd), near.v.grouped(v_BKSd)
            dq, dk, dv = near.made.grouped(dq_BNSd), near.dk.grouped(dk_BKSd), near.dv.grouped(dv_BKSd)
            gradient = near.gradient.grouped(gradient_BNSd)
            for place, kept in zip(places, every, strict=True):
                near.q.fetch(q, place)
                near.k.fetch(k, place)
                near.v.fetch(v, place)
                near.gradient.fetch(gradient, place)
                for i, block in reversed(list(enumerate(near.blocks))):  # the last one sees all keys
                    block.back(kept.scores[i].whole if kept else block.weights(block.scores))
                near.made.put_back(dq, place)
                near.dk.put_back(dk, place)
                near.dv.put_back(dv, place)
                if kept:
                    ctx.desk.take_back(kept)
        return dq_BNSd, dk_BKSd, dv_BKSd, None


def _some_heads(q_BNSd: Tensor, k_BKSd: Tensor) -> tuple[list[Place], Size]:
    """In which steps all heads are taken, and how large these are: as many heads as a divisor of K."""
    (B, N, S, d), K = q_BNSd.shape, k_BKSd.shape[1]
    most = max(1.0, 1.5 * _ROOM / max(Size(1, S, N // K, d).scores))
    n = max(n for n in range(1, K + 1) if K % n == 0 and n <= most)
    return [(b, slice(first, first + n)) for b in range(B) for first in range(0, K, n)], Size(n, S, N // K, d)


def _rooms(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Room for gradients of these (B, N, S, d), token by token; as columns of one tensor where they are."""
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
    """Room for (B, N, S, d), which lies token by token."""
    B, N, S, d = like_BNSd.shape
    return like_BNSd.new_empty_strided((B, N, S, d), (S * N * d, d, N * d, 1))
