"""Parallel styles of context parallelism, and attention cores that attend to the tokens of other ranks.

Shapes: B samples, S tokens of this rank, N query heads, K heads of keys and values, d width of a head.
R = S x (query heads that share one head of keys and values), T keys of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raypar.actors.autograd.apply_function import apply_function
from raypar.actors.collective import autograd
from raypar.actors.collective.group import Group
from raypar.actors.context_parallel.experts import ExpertsOfTokens
from raypar.actors.context_parallel.kv_exchange import AllGather, Carrier, Ring
from raypar.actors.context_parallel.ring_attention import Bias, View, ring_attend
from raypar.actors.context_parallel.sequence import tokens_of
from raypar.actors.layers.attention.attention import Attention, Core, seen_before
from raypar.actors.layers.dropout import sharded_dropout
from raypar.actors.layers.masks import sliding_window
from raypar.actors.models.base import Kind
from raypar.actors.models.parallel_style import Applied, AxisStyles, ParallelStyle, ShardedDropout
from raypar.actors.sharding import Pieces, Sharding
from raypar.actors.specs.types import Context
from raypar.actors.tensors import bent


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
    return apply_function(_Scores, q_BKRd, k_BKTd, carrier, size)


def ring_values(weights_BKRT: Tensor, v_BKTd: Tensor, carrier: Carrier) -> Tensor:
    """Return the product of attention weights and the values of all ranks, (B, K, R, d).

    Args:
        weights_BKRT: Weights (B, K, R, size x T), for the keys in the order of the ranks.
        v_BKTd: This rank's values (B, K, T, d).
        carrier: Brings the values of the other ranks.
    """
    return apply_function(_Values, weights_BKRT, v_BKTd, carrier)


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


def context_styles(context: Context, group: Group) -> AxisStyles:
    """Return the styles of context parallelism over a group.

    Every rank holds some tokens of each sequence. Layers compute its tokens, and only the attention core communicates
    with other ranks. Weights are whole on every rank, and their gradients are partial: those of its tokens.

    Args:
        context: How the core communicates: "ring" (keys and values go round a ring while the core computes
            with them: Liu et al. 2023), "all_gather" (the keys and values of all ranks are gathered first: Llama 3 team
            2024, section 3.3.2), "ulysses" (an all_to_all gives each rank all tokens of some heads, and another one
            restores the layout: Jacobs et al. 2023) or "rsa" (as "ring", but full rows of scores are kept: Li et al.
            2021).
        group: The context-parallel group.
    """
    tokens = tokens_of(context, group.size)[group.rank]
    flow = Sharding({1: tokens})
    styles: dict[Kind, ParallelStyle] = {
        "heads": ContextAttention(context, group),
        "drop": ShardedDropout(flow),
        "table": TableOfTokens(tokens),
        "moe": ExpertsOfTokens(tokens_of(context, group.size), group),
    }
    return AxisStyles(styles, flow)


@dataclass(frozen=True)
class ContextAttention(ParallelStyle):
    """Replace an attention core by one that attends to the tokens of all ranks.

    Attributes:
        context: How it communicates; see ``context_styles``.
        group: The context-parallel group.
    """

    context: Context
    group: Group

    def apply(self, name: str, module: nn.Module) -> Applied:
        assert isinstance(module, Attention)
        module.tokens = tokens_of(self.context, self.group.size)[self.group.rank]
        module.core = context_core(self.context, module.core, self.group)
        return Applied(module)


@dataclass(frozen=True)
class TableOfTokens(ParallelStyle):
    """Let a module that computes one row per token return only the rows of this rank's tokens.

    The module is called with a number of tokens, which the style replaces by that of the whole sequence.

    Attributes:
        tokens: This rank's pieces of the sequence.
    """

    tokens: Pieces

    def apply(self, name: str, module: nn.Module) -> Applied:
        module.register_forward_pre_hook(lambda _, inputs: (self.tokens.whole_length(inputs[0]), *inputs[1:]))
        module.register_forward_hook(lambda _, inputs, rows: self.tokens.take(rows, 0))
        return Applied(module)


def context_core(context: Context, core: Core, group: Group) -> Core:
    """Return the core that computes the same as ``core`` when each rank holds some of the tokens.

    Args:
        context: How it communicates; see ``context_styles``.
        core: The core for whole sequences.
        group: The context-parallel group.
    """
    tokens = tokens_of(context, group.size)
    if context == "ulysses":
        return _UlyssesCore(core, group, tokens)
    if context == "rsa":
        return _RowCore(core, group, tokens)
    return _BlockCore(core, Ring(group) if context == "ring" else AllGather(group), group, tokens)


class _ContextCore(Core):
    """A core for this rank's queries (B, N, S, d), keys and values (B, K, S, d).

    Args:
        core: The core for whole sequences, whose settings are copied.
        group: The context-parallel group.
        tokens: The tokens of each rank.
    """

    def __init__(self, core: Core, group: Group, tokens: Sequence[Pieces]) -> None:
        super().__init__(core.kind, core.drop.p, core.alibi, core.scratch, core.window, core.documents, core.cap)
        self.group, self.tokens = group, tokens

    def _bias_of(self, q_BNSd: Tensor) -> Bias | None:
        return None if self.alibi is None else Bias(torch.tensor(self.alibi.slopes, device=q_BNSd.device).to(q_BNSd))


class _BlockCore(_ContextCore):
    """Attention in blocks, over the keys and values of one rank after the other; see ``blockwise``.

    Args:
        core: As in ``_ContextCore``.
        carrier: Exchanges the keys and values of all ranks.
        group: As in ``_ContextCore``.
        tokens: As in ``_ContextCore``.
    """

    def __init__(self, core: Core, carrier: Carrier, group: Group, tokens: Sequence[Pieces]) -> None:
        super().__init__(core, group, tokens)
        self.carrier = carrier

    def attend(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, starts_BS: Tensor | None) -> Tensor:
        """Compute this rank's outputs, block by block."""
        tokens = self.tokens[self.group.rank]
        mask = None
        if self.dropout:
            every = tokens.whole_length(q_BNSd.shape[2])
            ones = q_BNSd.new_ones((*q_BNSd.shape[:3], every))
            mask = sharded_dropout(self.drop, Sharding({2: tokens})).train()(ones)
        fused = self.kind != "materialised" and mask is None and q_BNSd.device.type == "cpu"
        view = View(self.tokens, self.group.rank, fused, self._bias_of(q_BNSd), mask, self.window, starts_BS)
        return ring_attend(q_BNSd, k_BKSd, v_BKSd, view, self.carrier)

    def keeps_scores(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> bool:
        """Return whether there is dropout: among the saved tensors, only its mask has the scores' size."""
        return self.dropout > 0


class _UlyssesCore(_ContextCore):
    """Attention over all tokens of some heads, between two all_to_alls."""

    def attend(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, starts_BS: Tensor | None) -> Tensor:
        """Exchange tokens for heads, compute these heads for all tokens, and exchange back."""
        ranks, heads = self.group.size, q_BNSd.shape[1]
        if (kv_heads := k_BKSd.shape[1]) % ranks:  # several ranks need the same head
            k_BKSd, v_BKSd = (part.repeat_interleave(ranks // kv_heads, 1) for part in (k_BKSd, v_BKSd))
        inner = Core(self.kind, 0.0, None, self.scratch, self.window, cap=self.cap)
        if self.alibi is not None:
            first = self.group.rank * heads // ranks
            inner.alibi = self.alibi.part(first, first + heads // ranks)
        if self.dropout:
            inner.drop = sharded_dropout(self.drop, Sharding({1: Pieces.at(self.group.rank, ranks)}))
            inner.kind = "materialised"
        if starts_BS is not None:
            inner.documents.starts = autograd.all_gather(starts_BS.contiguous(), self.group, 1)
        mine = (autograd.all_to_all(part, self.group, 1, 2) for part in (q_BNSd, k_BKSd, v_BKSd))
        return autograd.all_to_all(inner(*mine), self.group, 2, 1)


class _RowCore(_ContextCore):
    """Ring self-attention: full rows of scores, computed while first the keys and then the values go round a ring.

    It exists for comparison: it saves the scores of all keys for the backward, and ring attention saves none.

    Source: Li et al. 2021, "Sequence Parallelism: Long Sequence Training from System Perspective".
    """

    def attend(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, starts_BS: Tensor | None) -> Tensor:
        """Compute this rank's outputs from its queries' scores of all tokens."""
        B, N, S, d = q_BNSd.shape
        K, ranks, carrier = k_BKSd.shape[1], self.group.size, Ring(self.group)
        q_BKRd = (q_BNSd / math.sqrt(d)).reshape(B, K, N // K * S, d)
        scores = bent(ring_scores(q_BKRd, k_BKSd, carrier, ranks).view(B, N, S, ranks * S), self.cap)
        q_positions = torch.arange(self.group.rank * S, (self.group.rank + 1) * S)
        k_positions = torch.arange(ranks * S)
        if (bias := self._bias_of(q_BNSd)) is not None:
            scores = scores + bias.between(q_positions.to(scores.device), k_positions.to(scores.device))
        else:
            scores = scores.masked_fill((k_positions > q_positions[:, None]).to(scores.device), -math.inf)
        if self.window is not None:
            seen = sliding_window(self.window)(q_positions[:, None], k_positions)
            scores = scores.masked_fill(~seen.to(scores.device), -math.inf)
        if starts_BS is not None:
            scores = scores.masked_fill(seen_before(starts_BS, k_positions.to(starts_BS))[:, None], -math.inf)
        drop = sharded_dropout(self.drop, Sharding({2: self.tokens[self.group.rank]})).train(self.training)
        weights = drop(scores.softmax(-1))
        return ring_values(weights.view(B, K, N // K * S, -1), v_BKSd, carrier).view(B, N, S, d)

    def keeps_scores(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> bool:
        return True
