"""Causal self-attention, multi-head or grouped-query: several query heads may share one head of keys and values.

Shapes: B microbatch, S sequence, D hidden, N query heads, K heads of keys and values, d width of a head, E any width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.autograd.recompute import SelectiveRecompute, drawn_again, rerun
from raypar.actors.autograd.torch_private import keeps_attention_scores
from raypar.actors.layers.adapter import adapter_of, applied, fanned
from raypar.actors.layers.attention import attention_blocks
from raypar.actors.layers.attention.attention_scratch import ScratchAllocator
from raypar.actors.layers.attention.kv_cache import Incremental, KVCache
from raypar.actors.layers.attention.token_slices import TokenSlices
from raypar.actors.layers.documents import Documents
from raypar.actors.layers.dropout import sharded_dropout
from raypar.actors.layers.linear import SharedInputLinears
from raypar.actors.layers.masks import sliding_window
from raypar.actors.layers.positions import Alibi, Rope
from raypar.actors.sharding import Pieces, Sharding
from raypar.actors.specs.model import AttentionKind, Transformer
from raypar.actors.tensors import Values, bent, in_fp32


class Core(nn.Module, SelectiveRecompute):
    """Causal attention core: softmax(q k^T / sqrt(d)) v, where each query sees its own and earlier tokens.

    With selective recomputation the backward runs the core again instead of keeping tensors of the scores' size
    (Korthikanti et al. 2022, section 5).

    Args:
        kind: Implementation: "materialised" (op by op), "blocks" (attention_blocks.py where it serves, op by op with
            dropout on a GPU), or torch's.
        dropout: Dropout probability of the softmax weights.
        alibi: Bias to add to the scores; None for none.
        scratch: Scratch memory for attention in blocks; None for new memory.
        window: Number of tokens that a query sees, its own and those right before it; None for all.
        documents: Where documents begin: a query sees nothing before its own; None if there is only one.
        cap: Soft cap of scores s, which become cap * tanh(s / cap); None for no cap. It needs "materialised".
    """

    def __init__(
        self,
        kind: AttentionKind,
        dropout: float,
        alibi: Alibi | None,
        scratch: ScratchAllocator | None = None,
        window: int | None = None,
        documents: Documents | None = None,
        cap: float | None = None,
    ) -> None:
        super().__init__()
        self.scratch, self.documents, self.cap = scratch or ScratchAllocator(), documents or Documents(), cap
        self.kind, self.alibi, self.window = kind, alibi, window
        self._further: dict[tuple[int, int], Tensor] = {}  # by first query and number of keys, the bias of a slice
        self.drop: nn.Dropout = nn.Dropout(dropout)

    def forward(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> Tensor:
        """Compute attention: q (B, N, S, d), k and v (B, K, S, d) -> (B, N, S, d)."""
        starts_BS = self.documents.starts
        if self.recomputes and torch.is_grad_enabled() and self.keeps_scores(q_BNSd, k_BKSd, v_BKSd):
            attend = partial(self.attend, starts_BS=starts_BS)
            return _again(attend, q_BNSd, k_BKSd, v_BKSd, draws=self.dropout > 0)
        return self.attend(q_BNSd, k_BKSd, v_BKSd, starts_BS)

    @property
    def dropout(self) -> float:
        """The dropout probability in the present mode: 0 outside of training."""
        return self.drop.p if self.training else 0.0

    def attend(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, starts_BS: Tensor | None) -> Tensor:
        """Compute the same as ``forward``, without recomputation in the backward.

        Args:
            q_BNSd: The queries (B, N, S, d), of the last S tokens if there are more keys.
            k_BKSd: The keys (B, K, S, d), or of more tokens (B, K, T, d).
            v_BKSd: The values, of the same tokens.
            starts_BS: Where the documents of the queries begin, (B, S); None if a sequence is one document.
        """
        bias = self._bias_up_to(q_BNSd, starts_BS, k_BKSd.shape[2])
        if self._is_materialised(q_BNSd):
            return _materialised(q_BNSd, k_BKSd, v_BKSd, bias, self.drop, self.cap)
        if self._in_blocks(q_BNSd, k_BKSd, v_BKSd, starts_BS):
            return attention_blocks.attend(q_BNSd, k_BKSd, v_BKSd, self.scratch)
        settings = _settings(q_BNSd, k_BKSd, bias, self.dropout)
        return F.scaled_dot_product_attention(q_BNSd, k_BKSd, v_BKSd, **settings)

    def narrow(self, heads: int, sharding: Sharding) -> None:
        """Restrict the core to this actor's part of the heads or of the batch.

        With dropout it becomes "materialised", because the mask must be this actor's part of the whole mask.

        Args:
            heads: Number of query heads before the restriction.
            sharding: This actor's part of the scores (B, N, S, S).
        """
        if self.alibi is not None:
            self.alibi = self.alibi.part(*sharding[1].span(heads))
        if self.drop.p:
            self.drop, self.kind = sharded_dropout(self.drop, sharding), "materialised"

    def keeps_scores(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> bool:
        """Return whether a backward of ``attend`` keeps (B, N, S, S) tensors.

        Of torch's kernels only the plain one (MATH) does.
        """
        if self._is_materialised(q_BNSd):
            return True
        starts_BS = self.documents.starts
        if self._in_blocks(q_BNSd, k_BKSd, v_BKSd, starts_BS):
            return False
        settings = _settings(q_BNSd, k_BKSd, self._bias_up_to(q_BNSd, starts_BS, k_BKSd.shape[2]), self.dropout)
        return keeps_attention_scores(q_BNSd, k_BKSd, v_BKSd, **settings)

    def _is_materialised(self, q_BNSd: Tensor) -> bool:
        """Return whether the core is computed op by op.

        With dropout that is so on GPUs, unless the run sets "fused": kernels there draw masks that depend on the
        shape of the actor's part, so that results would depend on the layout.
        """
        draws_by_layout = self.kind == "blocks" and self.dropout > 0 and q_BNSd.device.type != "cpu"
        return self.kind == "materialised" or draws_by_layout

    def _in_blocks(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, starts_BS: Tensor | None) -> bool:
        plain = self.kind == "blocks" and self.alibi is None and not self.dropout
        plain = plain and not self._is_narrow(k_BKSd.shape[2])
        return plain and starts_BS is None and attention_blocks.suits_blocks(q_BNSd, k_BKSd, v_BKSd)

    def _is_narrow(self, length: int) -> bool:
        """Return whether the window is shorter than a sequence of this length."""
        return self.window is not None and self.window < length

    def _bias_up_to(self, q_BNSd: Tensor, starts_BS: Tensor | None, length: int) -> Tensor | None:
        """Return the result of ``_bias``, cached for slices: all microbatches keep it for their backward."""
        first = length - q_BNSd.shape[2]
        if not first:
            return self._bias(q_BNSd, starts_BS, length)
        cached = self._further.get((first, length))
        if cached is None or (cached.dtype, cached.device) != (q_BNSd.dtype, q_BNSd.device):
            whole = self._bias(q_BNSd, starts_BS, length)
            assert whole is not None
            cached = self._further[first, length] = whole.detach()
        return cached

    def _bias(self, q_BNSd: Tensor, starts_BS: Tensor | None, length: int) -> Tensor | None:
        """Return the bias of the scores of the last S of ``length`` tokens, with -inf for hidden keys.

        Its shape is (N, S, T), (1, S, T), or with documents (B, N, S, T) or (B, 1, S, T). None if each query sees all
        tokens up to its own, and the sequence has no earlier tokens.
        """
        first = length - q_BNSd.shape[2]
        bias = None if self.alibi is None else self.alibi.bias(length, q_BNSd)[:, first:]
        is_narrow = self._is_narrow(length)
        if not is_narrow and starts_BS is None and (first == 0 or bias is not None):
            return bias
        positions = torch.arange(length, device=q_BNSd.device)
        bias = q_BNSd.new_zeros(1, length - first, length) if bias is None else bias
        window = self.window if is_narrow and self.window is not None else length
        bias = bias.masked_fill(~sliding_window(window)(positions[first:, None], positions), -math.inf)
        if starts_BS is None:
            return bias
        return bias.masked_fill(seen_before(starts_BS, positions)[:, None], -math.inf)


class Attention(nn.Module, Incremental):
    """Self-attention layer, (B, S, D) -> (B, S, D): projections to q, k and v, the core, and an output projection.

    Unless the model has ``qkv_bias``, the projections to q, k and v have no biases. Without rope a bias of the keys
    shifts all scores of a query alike, which a softmax ignores: its gradient is rounding noise, and Adam turns that
    noise into steps of full size.

    Args:
        spec: Settings of the model.
        between: Rotary positions or ALiBi; None for neither.
        scratch: Scratch memory for attention in blocks, shared by the blocks of an actor.
        linear: The class of its linear layers.
        window: Number of tokens that a token attends to; None for all before it.
        documents: Where the documents of the microbatch begin; None if there is only one.
        slices: The present slice of the microbatch; None if microbatches are not cut.

    Attributes:
        tokens: The pieces of the sequence that this actor holds.
        q_norm, k_norm: Norms of the queries and the keys of every head, over d; None if the model has none.
    """

    def __init__(
        self,
        spec: Transformer,
        between: Rope | Alibi | None,
        scratch: ScratchAllocator,
        linear: type[nn.Linear],
        *,
        window: int | None = None,
        documents: Documents | None = None,
        slices: TokenSlices | None = None,
    ) -> None:
        super().__init__()
        self.width, self.tokens, self._slices = spec.head_size, Pieces(), slices or TokenSlices()
        self._rope = between if isinstance(between, Rope) else None
        kv, biased = self.width * spec.num_kv_heads, spec.qkv_bias
        self.q = linear(spec.hidden, self.width * spec.heads, bias=biased)
        self.k, self.v = linear(spec.hidden, kv, bias=biased), linear(spec.hidden, kv, bias=biased)
        self.q_norm = nn.RMSNorm(self.width, eps=spec.norm_eps) if spec.qk_norm else None
        self.k_norm = nn.RMSNorm(self.width, eps=spec.norm_eps) if spec.qk_norm else None
        alibi = between if isinstance(between, Alibi) else None
        scale = spec.query_scale
        self._longer = 1.0 if scale is None else math.sqrt(self.width / scale)  # the core divides by sqrt(width)
        self.core = Core(spec.attention, spec.dropout, alibi, scratch, window, documents, spec.attention_cap)
        self.out = linear(self.width * spec.heads, spec.hidden, bias=spec.has_biases)
        self.q_lora, self.k_lora = adapter_of(spec, self.q, "q"), adapter_of(spec, self.k, "k")
        self.v_lora, self.out_lora = adapter_of(spec, self.v, "v"), adapter_of(spec, self.out, "out")
        self.fan = SharedInputLinears(together=spec.attention == "blocks")

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Attend to the tokens of the sequence."""
        layers = (self.q, self.q_lora), (self.k, self.k_lora), (self.v, self.v_lora)
        q_BNSd, k_BKSd, v_BKSd = (
            y_BSE.unflatten(-1, (-1, self.width)).transpose(1, 2) for y_BSE in fanned(self.fan, x_BSD, layers)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BNSd, k_BKSd = self.q_norm(q_BNSd), self.k_norm(k_BKSd)
        if self._longer != 1.0:
            q_BNSd = q_BNSd * self._longer
        if self.sequences is not None and self.sequences.at is not None:
            y_BNSd = self._further(q_BNSd, k_BKSd, v_BKSd, self.sequences, self.sequences.at)
        else:
            now = self._slices.now
            tokens = self.tokens if now is None else now.tokens
            if self._rope is not None:
                q_BNSd, k_BKSd = self._rope.turn(q_BNSd, tokens), self._rope.turn(k_BKSd, tokens)
            if self.sequences is not None:
                self.sequences.fill(self, k_BKSd, v_BKSd)
            inputs = q_BNSd, k_BKSd, v_BKSd
            y_BNSd = self.core(*inputs) if now is None else self._slices.attend(self.core, *inputs)
        return applied(self.out, self.out_lora, y_BNSd.transpose(1, 2).flatten(2))

    def _further(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, sequences: KVCache, at_B: Tensor) -> Tensor:
        """Compute the core for each sequence's next token, whose keys and values are added to the cache."""
        if self._rope is not None:
            q_BNSd, k_BKSd = self._rope.turn_at(q_BNSd, at_B), self._rope.turn_at(k_BKSd, at_B)
        k_BKTd, v_BKTd = sequences.extended(self, k_BKSd, v_BKSd)
        slopes = () if self.core.alibi is None else self.core.alibi.slopes
        bias_BN1T = sequences.bias(torch.promote_types(q_BNSd.dtype, torch.float32), slopes, self.core.window)
        return _materialised(q_BNSd, k_BKTd, v_BKTd, bias_BN1T, nn.Identity(), self.core.cap)


def seen_before(starts_BS: Tensor, keys: Tensor) -> Tensor:
    """Return which keys are before the document of a query, (B, S, T) bool.

    Args:
        starts_BS: Where the documents of the queries begin, (B, S).
        keys: Positions (T,) of the keys.
    """
    return keys < starts_BS[..., None]


def _again(attend: Callable[..., Tensor], *inputs: Tensor, draws: bool) -> Tensor:
    """Compute ``attend(*inputs)`` but keep only the inputs; the backward runs it again.

    If ``draws``, dropout draws the same random numbers the second time.
    """
    redraw = drawn_again(inputs[0].device) if draws else None

    def again(*leaves: Tensor) -> Values:
        if redraw is not None:
            redraw()
        return (attend(*leaves),)

    (y_BNSd,) = rerun(lambda *values: (attend(*values),), again, inputs)
    return y_BNSd


def _settings(q_BNSd: Tensor, k_BKSd: Tensor, bias: Tensor | None, dropout: float) -> dict[str, Any]:
    """Return the keyword arguments of torch's scaled_dot_product_attention. A bias includes the causal mask."""
    return {
        "attn_mask": bias if bias is None or bias.dim() == 4 else bias[None],
        "dropout_p": dropout,
        "is_causal": bias is None,
        "enable_gqa": q_BNSd.shape[1] != k_BKSd.shape[1],
    }


def _materialised(
    q_BNSd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, bias: Tensor | None, drop: nn.Module, cap: float | None
) -> Tensor:
    """Compute the core op by op, of the last S of T tokens. Without a bias S is T.

    Autograd keeps the softmax (B, N, S, T), with dropout also the mask and the product of both, and with a cap also the
    tanh. The N/K query heads that share a head of keys are stacked as rows of one matrix (R = N/K S), so that keys and
    values are not copied.
    """
    B, N, S, d = q_BNSd.shape
    K, T = k_BKTd.shape[1:3]
    q_BKRd = (q_BNSd / math.sqrt(d)).reshape(B, K, N // K * S, d)
    scores_BNST = bent(in_fp32(q_BKRd @ k_BKTd.transpose(-2, -1)).view(B, N, S, T), cap)
    if bias is None:
        later_SS = torch.ones(S, S, dtype=torch.bool, device=q_BNSd.device).triu(1)
        scores_BNST.masked_fill_(later_SS, -math.inf)
    else:
        scores_BNST.add_(bias)
    weights_BNST: Tensor = drop(scores_BNST.softmax(dim=-1).to(v_BKTd.dtype))
    return (weights_BNST.view(B, K, N // K * S, T) @ v_BKTd).view(B, N, S, d)
