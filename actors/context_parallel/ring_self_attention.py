"""Ring self-attention: full rows of attention scores, computed while keys and then values go round a ring.

It exists for comparison: it keeps the scores of all keys for the backward, and ring attention keeps none.

Shapes: B samples, K heads of keys and values, R = (queries of this rank) x (query heads that share one head of keys and
values), T keys of one rank, d width of a head.

Source: Li et al. 2021, "Sequence Parallelism: Long Sequence Training from System Perspective".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raypar.actors.context_parallel.kv_exchange import Carrier


def ring_scores(q_BKRd: Tensor, k_BKTd: Tensor, carrier: Carrier, size: int) -> Tensor:
    """Return q k^T for the keys of all ranks.

    Args:
        q_BKRd: Queries (B, K, R, d).
        k_BKTd: This rank's keys (B, K, T, d).
        carrier: Brings the keys of the other ranks.
        size: Number of ranks.

    Returns:
        The scores (B, K, R, size x T); the keys are in the order of the ranks.
    """
    out: Tensor = _Scores.apply(q_BKRd, k_BKTd, carrier, size)  # type: ignore[no-untyped-call]
    return out


def ring_values(weights_BKRT: Tensor, v_BKTd: Tensor, carrier: Carrier) -> Tensor:
    """Return the product of attention weights and the values of all ranks, (B, K, R, d).

    Args:
        weights_BKRT: Weights (B, K, R, size x T), for the keys in the order of the ranks.
        v_BKTd: This rank's values (B, K, T, d).
        carrier: Brings the values of the other ranks.
    """
    out: Tensor = _Values.apply(weights_BKRT, v_BKTd, carrier)  # type: ignore[no-untyped-call]
    return out


class _Scores(torch.autograd.Function):
    """The product of queries and keys, called RingQK in the paper."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, carrier: Carrier, size: int) -> Tensor:
        ctx.save_for_backward(q, k)
        ctx.carrier = carrier
        scores = q.new_empty((*q.shape[:3], size, k.shape[2]))
        for source, keys in carrier.visit(k):
            scores[..., source, :] = q @ keys.transpose(-2, -1)
        rows: Tensor = scores.flatten(-2)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k = ctx.saved_tensors
        by_source, dq = gradient.unflatten(-1, (-1, k.shape[2])), torch.zeros_like(q)

        def contribute(source: int, keys: Tensor) -> Tensor:
            part: Tensor = by_source[..., source, :]
            dq.add_(part @ keys)
            made: Tensor = part.mT @ q
            return made

        return dq, ctx.carrier.back(k, contribute), None, None


class _Values(torch.autograd.Function):
    """The product of weights and values, called RingAV in the paper."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, v: Tensor, carrier: Carrier) -> Tensor:
        ctx.save_for_backward(weights, v)
        ctx.carrier = carrier
        by_source = weights.unflatten(-1, (-1, v.shape[2]))
        out = v.new_zeros((*weights.shape[:3], v.shape[3]))
        for source, values in carrier.visit(v):
            out += by_source[..., source, :] @ values
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weights, v = ctx.saved_tensors
        by_source, made = weights.unflatten(-1, (-1, v.shape[2])), torch.empty_like(weights)

        def contribute(source: int, values: Tensor) -> Tensor:
            made.unflatten(-1, (-1, v.shape[2]))[..., source, :] = gradient @ values.mT
            part: Tensor = by_source[..., source, :]
            return part.mT @ gradient

        return made, ctx.carrier.back(v, contribute), None
