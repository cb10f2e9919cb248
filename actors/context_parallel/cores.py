"""Parallel styles of context parallelism, and the attention cores that reach the tokens of other ranks.

Shapes: B samples, S tokens of this rank, N query heads, K heads of keys and values, d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raypar.actors.collective import autograd
from raypar.actors.collective.group import Group
from raypar.actors.context_parallel.experts import ExpertsOfTokens
from raypar.actors.context_parallel.kv_exchange import AllGather, Carrier, Ring
from raypar.actors.context_parallel.ring_attention import Bias, View, ring_attend
from raypar.actors.context_parallel.ring_self_attention import ring_scores, ring_values
from raypar.actors.context_parallel.sequence import tokens_of
from raypar.actors.layers.attention import Attention, Core, seen_before
from raypar.actors.layers.dropout import sharded_dropout
from raypar.actors.layers.masks import sliding_window
from raypar.actors.models.base import Kind
from raypar.actors.models.parallel_style import Applied, AxisStyles, ParallelStyle, ShardedDropout
from raypar.actors.sharding import Pieces, Sharding
from raypar.actors.specs.types import Context
from raypar.actors.tensors import bent


def context_styles(context: Context, group: Group) -> AxisStyles:
    """Return the styles of context parallelism over a group.

    Every rank holds some tokens of each sequence. Layers work on its own tokens, and only the attention core reaches
    the other ranks. Weights are whole on every rank, and their gradients are of its own tokens.

    Args:
        context: How the core reaches the other ranks: "ring" (keys and values go round a ring while the core computes
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
    """Let an attention core reach the tokens of the other ranks.

    Attributes:
        context: How it reaches them; see ``context_styles``.
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

    The module is called with a number of tokens. It is given that of the whole sequence.

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
        context: How it reaches the other ranks; see ``context_styles``.
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
    """A core that is given this rank's queries (B, N, S, d), keys and values (B, K, S, d).

    Args:
        core: The core for whole sequences, whose settings it takes.
        group: The context-parallel group.
        tokens: The tokens of each rank.
    """

    def __init__(self, core: Core, group: Group, tokens: Sequence[Pieces]) -> None:
        super().__init__(core.kind, core.drop.p, core.alibi, core.desk, core.window, core.documents, core.cap)
        self.group, self.tokens = group, tokens

    def _bias_of(self, q_BNSd: Tensor) -> Bias | None:
        return None if self.alibi is None else Bias(torch.tensor(self.alibi.slopes, device=q_BNSd.device).to(q_BNSd))


class _BlockCore(_ContextCore):
    """Attention in blocks, over the keys and values of one rank after the other; see ``blockwise``.

    Args:
        core: As in ``_ContextCore``.
        carrier: Brings the keys and values of the other ranks.
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
        """Return whether there is dropout: of the tensors that are kept, only its mask has the scores' size."""
        return self.dropout > 0


class _UlyssesCore(_ContextCore):
    """Attention over all tokens of some heads, between two all_to_alls."""

    def attend(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, starts_BS: Tensor | None) -> Tensor:
        """Exchange tokens for heads, compute these heads for all tokens, and exchange back."""
        ranks, heads = self.group.size, q_BNSd.shape[1]
        if (kv_heads := k_BKSd.shape[1]) % ranks:  # several ranks need the same head
            k_BKSd, v_BKSd = (part.repeat_interleave(ranks // kv_heads, 1) for part in (k_BKSd, v_BKSd))
        inner = Core(self.kind, 0.0, None, self.desk, self.window, cap=self.cap)
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
    """Attention with full rows of scores: first the keys go round a ring, then the values."""

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
