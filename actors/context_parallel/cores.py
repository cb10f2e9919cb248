"""Every layer on some of the tokens of each sequence, and attention across all of them.

Shapes: B microbatch, S tokens here, N heads, K heads of keys and values, d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from raypar.actors.collective import autograd
from raypar.actors.collective.group import Group
from raypar.actors.context_parallel.blockwise import Bias, View, attend
from raypar.actors.context_parallel.kv_exchange import AllGather, Carrier, Ring
from raypar.actors.context_parallel.ring_self_attention import ring_scores, ring_values
from raypar.actors.context_parallel.sequence import tokens_of
from raypar.actors.layers.attention import Attention, Core
from raypar.actors.layers.dropout import divided
from raypar.actors.models.base import Kind, Model
from raypar.actors.models.parallel_plan import Change, Division, Made
from raypar.actors.sharding import Portion
from raypar.actors.specs.types import Context


class ContextParallel(Division):
    """Divides sequences over a group: what works token by token does so on those that are here, and attention's core
    asks the other members. Weights are whole, and their gradients of these tokens.

    ring        keys and values go round while they are used (Liu et al. 2023)
    all_gather  keys and values of all members at once (Llama 3 team 2024, section 3.3.2)
    ulysses     all_to_all: all tokens of some heads, and back (Jacobs et al. 2023)
    rsa         as ring, but full rows of scores are kept (Li et al. 2021)
    """

    def __init__(self, model: Model, group: Group, context: Context) -> None:
        super().__init__(model)
        self.group, self.context = group, context
        self.tokens = tokens_of(context, group.size)[group.rank]
        self.flow = {1: self.tokens}

    @property
    def changes(self) -> Mapping[Kind, Change]:
        return {"heads": _heads, "drop": _drop, "table": _table}


def _heads(module: nn.Module, division: ContextParallel) -> Made:
    assert isinstance(module, Attention)
    module.tokens = division.tokens
    module.core = context_core(division.context, module.core, division.group)
    return Made(module)


def context_core(context: Context, core: Core, group: Group) -> Core:
    """What ``core`` computes, for the queries, keys and values (B, N, S, d) of the tokens of a member of the group."""
    portions = tokens_of(context, group.size)
    if context == "ulysses":
        return _UlyssesCore(core, group, portions)
    if context == "rsa":
        return _RowCore(core, group, portions)
    return _BlockCore(core, Ring(group) if context == "ring" else AllGather(group), group, portions)


def _drop(module: nn.Module, division: ContextParallel) -> Made:
    assert isinstance(module, nn.Dropout)
    return Made(divided(module, {1: division.tokens}))


def _table(module: nn.Module, division: ContextParallel) -> Made:
    """Asked for the rows of the tokens here, it makes those of the whole sequence."""
    tokens = division.tokens
    module.register_forward_pre_hook(lambda _, inputs: (tokens.whole(inputs[0]), *inputs[1:]))
    module.register_forward_hook(lambda _, inputs, rows: tokens.take(rows, 0))
    return Made(module)


class _ContextCore(Core):
    """A core whose queries, keys and values are those of the tokens here, (B, N, S, d) and twice (B, K, S, d)."""

    def __init__(self, core: Core, group: Group, portions: Sequence[Portion]) -> None:
        super().__init__(core.kind, core.drop.p, core.alibi, core.desk)
        self.group, self.portions = group, portions

    def _bias_of(self, q_BNSd: Tensor) -> Bias | None:
        return None if self.alibi is None else Bias(torch.tensor(self.alibi.slopes, device=q_BNSd.device).to(q_BNSd))


class _BlockCore(_ContextCore):
    """Attention by blocks, of the keys and values of one member after the other."""

    def __init__(self, core: Core, carrier: Carrier, group: Group, portions: Sequence[Portion]) -> None:
        super().__init__(core, group, portions)
        self.carrier = carrier

    def attend(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> Tensor:
        tokens = self.portions[self.group.rank]
        mask = None
        if self.dropout:
            every = tokens.whole(q_BNSd.shape[2])
            ones = q_BNSd.new_ones((*q_BNSd.shape[:3], every))
            mask = divided(self.drop, {2: tokens}).train()(ones)
        fused = self.kind != "materialised" and mask is None and q_BNSd.device.type == "cpu"
        view = View(self.portions, self.group.rank, fused, self._bias_of(q_BNSd), mask)
        return attend(q_BNSd, k_BKSd, v_BKSd, view, self.carrier)

    def keeps_scores(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> bool:
        """Only dropout's mask is as large."""
        return self.dropout > 0


class _UlyssesCore(_ContextCore):
    """All tokens of some of the heads here; between two all_to_alls attention is the plain one."""

    def attend(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> Tensor:
        ranks, heads = self.group.size, q_BNSd.shape[1]
        if (kv_heads := k_BKSd.shape[1]) % ranks:  # several members need the same one
            k_BKSd, v_BKSd = (part.repeat_interleave(ranks // kv_heads, 1) for part in (k_BKSd, v_BKSd))
        inner = Core(self.kind, 0.0, None, self.desk)
        if self.alibi is not None:
            first = self.group.rank * heads // ranks
            inner.alibi = self.alibi.part(first, first + heads // ranks)
        if self.dropout:
            inner.drop, inner.kind = divided(self.drop, {1: Portion.at(self.group.rank, ranks)}), "materialised"
        mine = (autograd.all_to_all(part, self.group, 1, 2) for part in (q_BNSd, k_BKSd, v_BKSd))
        return autograd.all_to_all(inner(*mine), self.group, 2, 1)


class _RowCore(_ContextCore):
    """Full rows of scores, from keys and then values that go round a ring."""

    def attend(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> Tensor:
        B, N, S, d = q_BNSd.shape
        K, ranks, carrier = k_BKSd.shape[1], self.group.size, Ring(self.group)
        q_BKRd = (q_BNSd / math.sqrt(d)).reshape(B, K, N // K * S, d)
        scores = ring_scores(q_BKRd, k_BKSd, carrier, ranks).view(B, N, S, ranks * S)
        mine, every = (torch.arange(i * S, j * S) for i, j in ((self.group.rank, self.group.rank + 1), (0, ranks)))
        if (bias := self._bias_of(q_BNSd)) is not None:
            scores = scores + bias.between(mine.to(scores.device), every.to(scores.device))
        else:
            scores = scores.masked_fill((every > mine[:, None]).to(scores.device), -math.inf)
        weights = divided(self.drop, {2: self.portions[self.group.rank]}).train(self.training)(scores.softmax(-1))
        return ring_values(weights.view(B, K, N // K * S, -1), v_BKSd, carrier).view(B, N, S, d)

    def keeps_scores(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> bool:
        return True
