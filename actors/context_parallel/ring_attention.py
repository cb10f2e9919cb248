"""Ring attention: the queries of this rank attend to the keys of one rank after the other, in blocks.

The keys are passed round a ring, or gathered at once: see ``kv_exchange``.

The softmax is computed online: each block of keys gives outputs and the logarithm of their divisor, from which the
outputs over all blocks are combined. No scores are kept for the backward.

Shapes: B samples, N query heads, K heads of keys and values, S queries of this rank, T keys of one rank, d width of a
head.

Sources: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; Milakov & Gimelshein 2018, "Online normalizer
calculation for softmax"; Dao et al. 2022, "FlashAttention".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raypar.actors.autograd.apply_function import apply_function
from raypar.actors.autograd.torch_private import flash_attention_cpu, flash_attention_cpu_backward
from raypar.actors.context_parallel.kv_exchange import Carrier
from raypar.actors.sharding import Pieces
from raypar.actors.tensors import finite_logs


class AttendedBlock(NamedTuple):
    """Adjacent queries of this rank, and the adjacent keys of one rank that they attend to.

    Attributes:
        queries: Slice of this rank's queries.
        keys: Slice of the other rank's keys.
        causal: Whether each query attends only to keys up to its own position in the block; else to all keys.
    """

    queries: slice
    keys: slice
    causal: bool


class Bias(NamedTuple):
    """The ALiBi bias of attention scores: slope x (position of the key - position of the query).

    Attributes:
        slopes: One slope per query head (N,).

    Source: Press et al. 2022, "Train Short, Test Long".
    """

    slopes: Tensor

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the bias (N, S, T) for positions of queries (S,) and keys (T,); -inf where the key is later."""
        distance = (keys - queries[:, None]).to(self.slopes)
        return self.slopes[:, None, None] * distance.masked_fill(distance > 0, -math.inf)


@dataclass(frozen=True)
class View:
    """The tokens that the queries of one rank attend to.

    Attributes:
        tokens: The pieces of the sequence that each rank holds, in rising order.
        rank: The rank whose queries these are.
        fused: Whether torch's fused CPU kernel is used, which has no dropout.
        bias: Bias of the scores, or None.
        mask: Dropout mask (B, N, S, tokens of the whole sequence), a factor of attention weights, or None.
        window: Number of tokens that a query attends to, itself and those directly before it; None for all.
        starts: For each query, the position in the whole sequence of its document's first token, (B, S); None if a
            sequence is one document.
    """

    tokens: Sequence[Pieces]
    rank: int
    fused: bool
    bias: Bias | None = None
    mask: Tensor | None = None
    window: int | None = None
    starts: Tensor | None = None

    def terms(self, source: int, length: int) -> Iterator[tuple[AttendedBlock, Terms]]:
        """Yield each of the ``blocks``, and what becomes of its scores. The arguments are those of ``blocks``."""
        for block in self.blocks(source, length):
            bias, mask = self.extras(block, source, length)
            yield block, Terms(block.causal, bias, mask, self.unseen(block, source, length), self.fused)

    def blocks(self, source: int, length: int) -> Iterator[AttendedBlock]:
        """Yield the blocks of queries of this rank and keys of another that attention needs.

        Blocks in which no query has a key within the window are left out.

        Args:
            source: Rank that holds the keys.
            length: Number of its keys, which is also the number of this rank's queries.
        """
        for block in self._causal_blocks(source, length):
            if self.window is None or bool((self._distance(block, source, length) < self.window).any()):
                yield block

    def _causal_blocks(self, source: int, length: int) -> Iterator[AttendedBlock]:
        """Yield the blocks with keys that are not later than the queries."""
        if source == self.rank:  # its pieces are in the order of the sequence, so one causal block is enough
            yield AttendedBlock(slice(0, length), slice(0, length), True)
            return
        own, theirs = self.tokens[self.rank].own, self.tokens[source].own
        piece = length // len(own)
        sees = [sum(other < mine for other in theirs) for mine in own]
        start = 0
        for stop in range(1, len(own) + 1):
            if stop == len(own) or sees[stop] != sees[start]:
                if sees[start]:
                    yield AttendedBlock(slice(start * piece, stop * piece), slice(0, sees[start] * piece), False)
                start = stop

    def _distance(self, block: AttendedBlock, source: int, length: int) -> Tensor:
        """Return the position of each query of a block minus that of each key, (queries, keys)."""
        positions = torch.arange(self.tokens[self.rank].whole_length(length))
        mine, theirs = self.tokens[self.rank].take(positions, 0), self.tokens[source].take(positions, 0)
        return mine[block.queries, None] - theirs[block.keys]

    def unseen(self, block: AttendedBlock, source: int, length: int) -> Tensor | None:
        """Return which keys of a block a query does not attend to; None if neither window nor documents hide any.

        Its shape is (queries, keys) bool, or with documents (B, 1, queries, keys).
        """
        if self.starts is not None:
            return self._in_other_documents(block, source, length, self.starts)
        if self.window is None:
            return None
        distance = self._distance(block, source, length)
        return (distance < 0) | (distance >= self.window) if bool((distance >= self.window).any()) else None

    def _in_other_documents(self, block: AttendedBlock, source: int, length: int, starts: Tensor) -> Tensor | None:
        positions = torch.arange(self.tokens[self.rank].whole_length(length))
        keys = self.tokens[source].take(positions, 0)[block.keys].to(starts)
        hidden = (keys < starts[:, block.queries, None])[:, None]
        if self.window is not None:
            hidden = hidden | (self._distance(block, source, length) >= self.window).to(hidden.device)
        if not bool(hidden.any()):
            return None
        return hidden | (self._distance(block, source, length) < 0).to(hidden.device)

    def extras(self, block: AttendedBlock, source: int, length: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the bias (N, queries, keys) and the dropout mask (B, N, queries, keys) of a block, or None for each.

        Args:
            block: The block.
            source: Rank that holds its keys.
            length: Number of keys of that rank.
        """
        mine, theirs = self.tokens[self.rank], self.tokens[source]
        positions = torch.arange(mine.whole_length(length)) if self.bias is not None or self.mask is not None else None
        if positions is None:
            return None, None
        keys = theirs.take(positions, 0)[block.keys]
        bias = None
        if self.bias is not None:
            device = self.bias.slopes.device
            bias = self.bias.between(mine.take(positions, 0)[block.queries].to(device), keys.to(device))
        return bias, None if self.mask is None else self.mask[:, :, block.queries][..., keys.to(self.mask.device)]


def ring_attend(q_BNSd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, view: View, carrier: Carrier) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v over the keys and values of all ranks, (B, N, S, d).

    Args:
        q_BNSd: This rank's queries (B, N, S, d).
        k_BKTd: This rank's keys (B, K, T, d), where T = S. N is a multiple of K.
        v_BKTd: This rank's values (B, K, T, d).
        view: What the queries attend to.
        carrier: Brings the keys and values of the other ranks.
    """
    return apply_function(_Attend, q_BNSd, k_BKTd, v_BKTd, view, carrier)


class _Attend(torch.autograd.Function):
    """Attention over the keys of all ranks.

    For the backward it keeps this rank's queries, keys, values and outputs, and one number per query and head. It keeps
    no scores and no tensors of other ranks.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, view: View, carrier: Carrier) -> Tensor:
        B, N, length, d = q.shape
        out = q.new_zeros((B, length, N, d), dtype=_exact(q)).transpose(1, 2)  # so that joining heads copies nothing
        total = out.new_full(q.shape[:3], -math.inf)  # logarithm of the sum of exponentials so far
        for source, kv in carrier.visit(torch.stack((k, v))):
            for block, terms in view.terms(source, length):
                keys, values = (_for_heads(part, q)[:, :, block.keys] for part in kv)
                seen, logs = _forward(q[:, :, block.queries], keys, values, terms)
                before = total[:, :, block.queries]
                after = torch.logaddexp(before, logs)
                part, least = out[:, :, block.queries], finite_logs(after)
                part.mul_((before - least).exp_().unsqueeze(-1)).addcmul_(
                    seen.to(part.dtype), (logs - least).exp_().unsqueeze(-1)
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
            for block, terms in view.terms(source, length):
                rows = slice(None), slice(None), block.queries
                keys, values = (_for_heads(part, q)[:, :, block.keys] for part in kv)
                dq_block, *dkv_block = _backward(gradient[rows], q[rows], keys, values, out[rows], total[rows], terms)
                dq[rows] += dq_block
                for part, grad in zip(made, dkv_block, strict=True):
                    part[:, :, block.keys] += grad.unflatten(1, (-1, shared)).sum(2) if shared > 1 else grad
            return made

        dk, dv = ctx.carrier.back(torch.stack((k, v)), contribute)
        return dq, dk, dv, None, None


def _for_heads(part_BKTd: Tensor, q_BNSd: Tensor) -> Tensor:
    """Repeat keys or values (B, K, T, d) for every query head, (B, N, T, d)."""
    shared = q_BNSd.shape[1] // part_BKTd.shape[1]
    return part_BKTd if shared == 1 else part_BKTd.repeat_interleave(shared, 1)


class Terms(NamedTuple):
    """What becomes of the scores of one block.

    Attributes:
        causal: As in ``AttendedBlock``.
        bias: Bias (N, S, T) or None.
        mask: Dropout mask (B, N, S, T) or None.
        hidden: Which keys a query does not see, (S, T) or (B, 1, S, T); None for those that ``causal`` or the bias
            hides.
        fused: As in ``View``.
    """

    causal: bool
    bias: Tensor | None
    mask: Tensor | None
    hidden: Tensor | None
    fused: bool

    @property
    def is_fused(self) -> bool:
        """Whether torch's kernel computes the block: it has no queries that see no key."""
        return self.fused and self.hidden is None


def _forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """Compute attention over the keys of one block.

    Returns:
        The outputs (B, N, S, d) over these keys alone, and the logarithm (B, N, S) of the sum of exponentials that they
        were divided by: 0 and -inf for a query that sees none of them.
    """
    if terms.is_fused:
        causal, extra = _as_torch(terms.causal, terms.bias, q)
        return flash_attention_cpu(_in_rows(q), _in_rows(k), _in_rows(v), causal, extra)
    scores = _scores(q, k, terms)
    logs = scores.logsumexp(-1)
    weights = (scores - finite_logs(logs).unsqueeze(-1)).exp_()
    return (weights if terms.mask is None else weights * terms.mask) @ v.to(weights.dtype), logs


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what one block adds to the gradients of its queries, keys and values.

    Args:
        gradient: Gradient of the outputs (B, N, S, d).
        q: Queries (B, N, S, d).
        k: Keys (B, N, T, d).
        v: Values (B, N, T, d).
        out: The outputs over all keys (B, N, S, d), not only those of this block.
        total: The logarithm of the sum of exponentials over all keys (B, N, S).
        terms: What becomes of the scores.
    """
    if terms.is_fused:
        causal, extra = _as_torch(terms.causal, terms.bias, q)
        gradient, q, k, v, out, total = map(_in_rows, (gradient, q, k, v, out, total))
        return flash_attention_cpu_backward(gradient, q, k, v, out, total, causal, extra)
    weights = (_scores(q, k, terms) - total.unsqueeze(-1)).exp_()
    exact = gradient.to(weights.dtype)
    seen = exact @ v.to(weights.dtype).transpose(-2, -1)
    used = weights
    if terms.mask is not None:
        seen, used = seen * terms.mask, weights * terms.mask
    rowsum = (exact * out).sum(-1, keepdim=True)
    scores = weights * (seen - rowsum) / math.sqrt(q.shape[-1])
    dq, dk, dv = scores @ k.to(scores.dtype), scores.transpose(-2, -1) @ q.to(scores.dtype), used.mT @ exact
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, terms: Terms) -> Tensor:
    exact = _exact(q)
    scores = (q.to(exact) / math.sqrt(q.shape[-1])) @ k.to(exact).transpose(-2, -1)
    if terms.bias is not None:
        scores.add_(terms.bias)
    elif terms.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(later, -math.inf)
    return scores if terms.hidden is None else scores.masked_fill_(terms.hidden.to(q.device), -math.inf)


def _in_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last stride is 1, as torch's kernel takes for granted."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _as_torch(causal: bool, bias: Tensor | None, q: Tensor) -> tuple[bool, Tensor | None]:
    """Return torch's arguments ``is_causal`` and ``attn_mask``. A bias masks later keys itself."""
    return (causal, None) if bias is None else (False, bias[None].to(q.dtype))


def _exact(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which sums over blocks are computed."""
    return tensor.dtype if tensor.dtype == torch.float64 else torch.float32
