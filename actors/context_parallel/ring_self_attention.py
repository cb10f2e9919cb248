"""Attention with full rows of scores, whose keys and values come round a ring (Li et al. 2021, ring self-attention).

Kept for the record, and for what it is compared with: scores take B x N x S x T x size elements, where attention by
blocks keeps none.

Shapes: B microbatch, K heads of keys and values, R queries of all heads that share one, T keys of one member, d width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raypar.actors.context_parallel.kv_exchange import Carrier


def ring_scores(q_BKRd: Tensor, k_BKTd: Tensor, carrier: Carrier, size: int) -> Tensor:
    """q k^T over the keys of all ``size`` members, (B, K, R, size x T), by rank."""
    out: Tensor = _Scores.apply(q_BKRd, k_BKTd, carrier, size)  # type: ignore[no-untyped-call]
    return out


def ring_values(weights_BKRT: Tensor, v_BKTd: Tensor, carrier: Carrier) -> Tensor:
    """weights v over the values of all members, (B, K, R, d)."""
    out: Tensor = _Values.apply(weights_BKRT, v_BKTd, carrier)  # type: ignore[no-untyped-call]
    return out


class _Scores(torch.autograd.Function):
    """RingQK."""

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
    """RingAV."""

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
