"""Attention under any mask, which holds the scores of one chunk of queries and one of keys at a time.

Shapes: B samples, N query heads, K heads of keys and values, S queries, T keys, d width of a head, R = N/K S rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raypar.actors.layers.masks import Mask, MaskMod, causal, demand_mask, seen_by
from raypar.actors.tensors import finite_logs, in_fp32


def chunked_attention(
    q_BNSd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, *, mask: Mask | MaskMod = causal, chunk: int = 128
) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v over the keys that each query sees.

    For the backward it keeps the inputs, the outputs and one number per query and head. It holds the scores of B x N x
    chunk x chunk pairs at a time, however long the sequences are, and the mask of ``chunk`` queries. It skips chunks of
    keys that no query sees.

    Args:
        q_BNSd: Queries (B, N, S, d), any float dtype; scores are computed in float32 or, of float64, in float64.
        k_BKTd: Keys (B, K, T, d). N is a multiple of K.
        v_BKTd: Values (B, K, T, d).
        mask: Which keys a query sees; see ``raypar.masks``.
        chunk: Number of queries, and of keys, whose scores are held at a time.

    Returns:
        The outputs (B, N, S, d); 0 for a query that sees no key.

    Raises:
        ValueError: If the shapes do not fit, a chunk has no tokens, or the mask is invalid (a MaskError).

    Source: Rabe & Staats 2021, "Self-attention Does Not Need O(n^2) Memory".
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}: it must be at least 1")
    demand_fitting_shapes(q_BNSd, k_BKTd, v_BKTd)
    demand_mask(mask, q_BNSd.device)
    out: Tensor = _Chunked.apply(q_BNSd, k_BKTd, v_BKTd, mask, chunk)  # type: ignore[no-untyped-call]
    return out


def demand_fitting_shapes(q_BNSd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor) -> None:
    """Raise ValueError if queries, keys and values do not fit each other."""
    if k_BKTd.shape != v_BKTd.shape or q_BNSd.shape[1] % k_BKTd.shape[1] or q_BNSd.shape[3] != k_BKTd.shape[3]:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkv", (q_BNSd, k_BKTd, v_BKTd), strict=True))
        raise ValueError(f"{shapes}: keys and values must be alike, q as wide, and their heads divide q's")


class _Chunked(torch.autograd.Function):
    """The autograd function of ``chunked_attention``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask | MaskMod, chunk: int) -> Tensor:
        out, total = torch.zeros_like(q), in_fp32(q).new_full(q.shape[:3], -math.inf)
        for rows in _chunks(q.shape[2], chunk):
            made = in_fp32(q).new_zeros(q[:, :, rows].shape)
            logs = total[:, :, rows]  # logarithm of the sum of exponentials so far
            for keys, hidden in _seen(rows, k, mask, chunk):
                scores = _scores(q[:, :, rows], k[:, :, keys], hidden)
                after = torch.logaddexp(logs, scores.logsumexp(-1))
                least = finite_logs(after)
                made.mul_((logs - least).exp_().unsqueeze(-1))
                made += _times(scores.sub_(least.unsqueeze(-1)).exp_(), in_fp32(v[:, :, keys]))
                logs.copy_(after)
            out[:, :, rows] = made.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.mask, ctx.chunk = mask, chunk
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(in_fp32(x)) for x in (q, k, v))
        for rows in _chunks(q.shape[2], ctx.chunk):
            given, mine = in_fp32(gradient[:, :, rows]), in_fp32(q[:, :, rows]) / math.sqrt(q.shape[3])
            sums = (given * in_fp32(out[:, :, rows])).sum(-1, keepdim=True)
            for keys, hidden in _seen(rows, k, ctx.mask, ctx.chunk):
                least = finite_logs(total[:, :, rows]).unsqueeze(-1)
                weights = _scores(q[:, :, rows], k[:, :, keys], hidden).sub_(least).exp_()
                dv[:, :, keys] += _by_head(weights, given, v.shape[1])
                scores = weights.mul_(_times(given, in_fp32(v[:, :, keys]).mT) - sums)
                dk[:, :, keys] += _by_head(scores, mine, k.shape[1])
                dq[:, :, rows] += _times(scores, in_fp32(k[:, :, keys])) / math.sqrt(q.shape[3])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _chunks(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, length)) for start in range(0, length, chunk))


def _seen(rows: slice, k_BKTd: Tensor, mask: Mask | MaskMod, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield the chunks of keys that some query sees, each with the hidden pairs (S, T) or (B, 1, S, T)."""
    samples, _, length, _ = k_BKTd.shape
    seen_BNST = seen_by(mask, rows, length, samples, k_BKTd.device)
    for keys in _chunks(length, chunk):
        seen = seen_BNST[..., keys]
        if bool(seen.any()):
            yield keys, ~seen


def _scores(q_BNSd: Tensor, k_BKTd: Tensor, hidden: Tensor) -> Tensor:
    """Return the scores (B, N, S, T), -inf for pairs that are hidden."""
    scores = _times(in_fp32(q_BNSd) / math.sqrt(q_BNSd.shape[3]), in_fp32(k_BKTd).mT)
    return scores.masked_fill_(hidden, -math.inf)


def _times(x_BNSe: Tensor, y_BKef: Tensor) -> Tensor:
    """Return the products (B, N, S, f) of each query head with its head of keys or values, which are not copied."""
    B, N, S, e = x_BNSe.shape
    K = y_BKef.shape[1]
    return (x_BNSe.reshape(B, K, N // K * S, e) @ y_BKef).view(B, N, S, -1)


def _by_head(x_BNST: Tensor, y_BNSd: Tensor, heads: int) -> Tensor:
    """Return x^T y (B, K, T, d), summed over the query heads that share a head of keys."""
    x_BKRT, y_BKRd = (part.reshape(part.shape[0], heads, -1, part.shape[-1]) for part in (x_BNST, y_BNSd))
    return x_BKRT.mT @ y_BKRd
