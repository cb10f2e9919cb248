"""Causal attention of some queries to some keys, in a form that adds up (Dao et al. 2022; Milakov & Gimelshein 2018).

Shapes: B microbatch, N heads, K heads of keys and values, S queries here, T keys of one member, d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raypar.actors.autograd.torch_private import flash_attention_cpu, flash_attention_cpu_backward
from raypar.actors.context_parallel.kv_exchange import Carrier
from raypar.actors.sharding import Pieces


class Block(NamedTuple):
    """Queries and keys, each a run of those that two members have. ``causal``: the k-th query sees the first k keys;
    else each one sees all."""

    queries: slice
    keys: slice
    causal: bool


class Bias(NamedTuple):
    """What is added to scores: slope (N,) x (position of the key - position of the query)."""

    slopes: Tensor

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """(N, S, T) from positions (S,) and (T,); -inf for what is later."""
        distance = (keys - queries[:, None]).to(self.slopes)
        return self.slopes[:, None, None] * distance.masked_fill(distance > 0, -math.inf)


@dataclass(frozen=True)
class View:
    """What the queries of one member attend to.

    Attributes:
        tokens: The pieces of the sequence that each member holds, in rising order.
        rank: The member's rank.
        fused: Whether torch's kernel may be used: on CPUs, and without dropout.
        bias: Added to the scores.
        mask: Dropout's mask (B, N, S, all T of the sequence), which the softmax is multiplied with.
    """

    tokens: Sequence[Pieces]
    rank: int
    fused: bool
    bias: Bias | None = None
    mask: Tensor | None = None

    def blocks(self, source: int, length: int) -> Iterator[Block]:
        """What of a member's ``length`` keys is seen, by as many queries."""
        if source == self.rank:  # pieces stand in the order of the sequence
            yield Block(slice(0, length), slice(0, length), True)
            return
        own, theirs = self.tokens[self.rank].own, self.tokens[source].own
        piece = length // len(own)
        sees = [sum(other < mine for other in theirs) for mine in own]
        start = 0
        for stop in range(1, len(own) + 1):
            if stop == len(own) or sees[stop] != sees[start]:
                if sees[start]:
                    yield Block(slice(start * piece, stop * piece), slice(0, sees[start] * piece), False)
                start = stop

    def extras(self, block: Block, source: int, length: int) -> tuple[Tensor | None, Tensor | None]:
        """The bias (N, S, T) of a block, and its part of the mask."""
        mine, theirs = self.tokens[self.rank], self.tokens[source]
        at = torch.arange(mine.whole_length(length)) if self.bias is not None or self.mask is not None else None
        if at is None:
            return None, None
        keys = theirs.take(at, 0)[block.keys]
        bias = None
        if self.bias is not None:
            device = self.bias.slopes.device
            bias = self.bias.between(mine.take(at, 0)[block.queries].to(device), keys.to(device))
        return bias, None if self.mask is None else self.mask[:, :, block.queries][..., keys.to(self.mask.device)]


def attend(q_BNSd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, view: View, carrier: Carrier) -> Tensor:
    """Softmax(q k^T / sqrt(d)) v over the keys and values of all members, (B, N, S, d)."""
    out: Tensor = _Attend.apply(q_BNSd, k_BKTd, v_BKTd, view, carrier)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    """Keeps the own queries, keys and values, the outputs and a number a query: no scores, and nothing of others."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, view: View, carrier: Carrier) -> Tensor:
        B, N, length, d = q.shape
        out = q.new_zeros((B, length, N, d), dtype=_exact(q)).transpose(1, 2)  # whoever joins the heads copies nothing
        total = out.new_full(q.shape[:3], -math.inf)  # logarithm of what the outputs were divided by
        for source, kv in carrier.visit(torch.stack((k, v))):
            for block in view.blocks(source, length):
                bias, mask = view.extras(block, source, length)
                keys, values = (_for_heads(part, q)[:, :, block.keys] for part in kv)
                seen, logs = _forward(q[:, :, block.queries], keys, values, block.causal, bias, mask, view.fused)
                before = total[:, :, block.queries]
                after = torch.logaddexp(before, logs)
                part = out[:, :, block.queries]
                part.mul_((before - after).exp_().unsqueeze(-1)).addcmul_(
                    seen.to(part.dtype), (logs - after).exp_().unsqueeze(-1)
                )
                before.copy_(after)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.view, ctx.carrier = view, carrier
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total = ctx.saved_tensors
        view, length, shared = ctx.view, q.shape[2], q.shape[1] // k.shape[1]
        dq = torch.zeros_like(q, memory_format=torch.contiguous_format)

        def contribute(source: int, kv: Tensor) -> Tensor:
            made = torch.zeros_like(kv)
            for block in view.blocks(source, length):
                rows = slice(None), slice(None), block.queries
                bias, mask = view.extras(block, source, length)
                keys, values = (_for_heads(part, q)[:, :, block.keys] for part in kv)
                inputs = gradient[rows], q[rows], keys, values, out[rows], total[rows]
                own, *others = _backward(*inputs, block.causal, bias, mask, view.fused)
                dq[rows] += own
                for part, other in zip(made, others, strict=True):
                    part[:, :, block.keys] += other.unflatten(1, (-1, shared)).sum(2) if shared > 1 else other
            return made

        dk, dv = ctx.carrier.back(torch.stack((k, v)), contribute)
        return dq, dk, dv, None, None


def _for_heads(part_BKTd: Tensor, q_BNSd: Tensor) -> Tensor:
    """Keys or values, once for every head of queries."""
    shared = q_BNSd.shape[1] // part_BKTd.shape[1]
    return part_BKTd if shared == 1 else part_BKTd.repeat_interleave(shared, 1)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, mask: Tensor | None, fused: bool
) -> tuple[Tensor, Tensor]:
    """Outputs (B, N, S, d) over these keys alone, and the logarithm (B, N, S) of what they were divided by."""
    if fused:
        causal, extra = _as_torch(causal, bias, q)
        return flash_attention_cpu(q, k, v, causal, extra)
    scores = _scores(q, k, causal, bias)
    logs = scores.logsumexp(-1)
    weights = (scores - logs.unsqueeze(-1)).exp_()
    return (weights if mask is None else weights * mask) @ v.to(weights.dtype), logs


def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    causal: bool,
    bias: Tensor | None,
    mask: Tensor | None,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys add to the gradients of queries, keys and values: ``out`` and ``total`` are those over all."""
    if fused:
        causal, extra = _as_torch(causal, bias, q)
        return flash_attention_cpu_backward(gradient, q, k, v, out, total, causal, extra)
    weights = (_scores(q, k, causal, bias) - total.unsqueeze(-1)).exp_()
    exact = gradient.to(weights.dtype)
    seen = exact @ v.to(weights.dtype).transpose(-2, -1)
    used = weights
    if mask is not None:
        seen, used = seen * mask, weights * mask
    about = (exact * out).sum(-1, keepdim=True)
    scores = weights * (seen - about) / math.sqrt(q.shape[-1])
    dq, dk, dv = scores @ k.to(scores.dtype), scores.transpose(-2, -1) @ q.to(scores.dtype), used.mT @ exact
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, causal: bool, bias: Tensor | None) -> Tensor:
    exact = _exact(q)
    scores = (q.to(exact) / math.sqrt(q.shape[-1])) @ k.to(exact).transpose(-2, -1)
    if bias is not None:
        return scores.add_(bias)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(later, -math.inf)
    return scores


def _as_torch(causal: bool, bias: Tensor | None, q: Tensor) -> tuple[bool, Tensor | None]:
    """A bias says what is later, too."""
    return (causal, None) if bias is None else (False, bias[None].to(q.dtype))


def _exact(tensor: Tensor) -> torch.dtype:
    """What sums over blocks are kept in."""
    return tensor.dtype if tensor.dtype == torch.float64 else torch.float32
