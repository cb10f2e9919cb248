"""What a worker builds from: plain descriptions of model, data and optimizer. Nothing here imports torch.

They are frozen dataclasses so that a run can be written down, compared, shipped to actors and read from TOML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from raypar.actors.bounds import Count, Positive, Share

Positions = Literal["learned", "sinusoidal", "hierarchical", "rope", "alibi"]
AttentionKind = Literal["blocks", "fused", "materialised"]
LinearKind = Literal["auto", "onednn", "torch"]


@dataclass(frozen=True)
class Transformer:
    """What GPT and Llama have in common: equal blocks over tokens, bytes unless a tokenizer says otherwise."""

    layers: Annotated[int, Ge(1), Le(100_000)] = 8
    """number of transformer blocks"""
    hidden: Count = 256
    """width of the residual stream"""
    heads: Count = 8
    """attention heads, a divisor of hidden"""
    seq: Count = 256
    """tokens a sequence, at most"""
    vocab: Count = 256
    """token ids run from 0 to vocab - 1"""
    dropout: Share = 0.0
    """probability, after embeddings, in attention and on both residual branches"""
    tied: bool = False
    """one logical weight for the embedding and the head (Press & Wolf 2017)"""
    positions: Positions = "learned"
    """learned, sinusoidal or hierarchical: added to embeddings; rope turns queries and keys, alibi biases scores"""
    rope_base: Positive = 10_000.0
    """of the angles of rope: the slowest pair turns by about 1 / rope_base a token"""
    attention: AttentionKind = "blocks"
    """fused is torch's kernel; blocks too, but for float32 on a thread of a CPU, where batched products of some queries
    at a time are faster, some of whose scores, up to 12 MiB an actor, wait for their backward; materialised keeps those
    of all pairs of tokens, as formulas count them"""
    linear: LinearKind = "auto"
    """whose products linear layers take of float32 on CPUs: torch is nn.Linear; onednn takes oneDNN's where they are
    large, some percent faster on an AMD EPYC; auto is torch on processors of Intel, whom MKL is for, else onednn"""

    def faults(self, right: Callable[..., bool]) -> Iterator[str]:
        """Sizes that don't fit each other, with the nearest ones that do.

        Args:
            right: tells of fields, by their paths in a run, whether each by itself is sound; others are left out
        """
        if not right("model.hidden", "model.heads"):
            return
        if self.hidden % self.heads:
            near = _divisor_near(self.heads, self.hidden)
            yield f"model.hidden {self.hidden} is not a multiple of model.heads {self.heads}: use {near} heads, say"
        elif right("model.positions") and self.positions == "rope" and self.hidden // self.heads % 2:
            width, fix = self.hidden // self.heads, "set model.hidden to a multiple of 2 * heads, or other positions"
            yield f"model.positions is 'rope', which turns pairs, but a head has the odd width {width}: {fix}"

    @property
    def num_kv_heads(self) -> int:
        """Heads of the keys and values."""
        return self.heads

    @property
    def mlp_width(self) -> int:
        """Width of a block's MLP."""
        raise NotImplementedError

    @property
    def mlp_matrices(self) -> int:
        """Matrices of hidden x mlp_width in an MLP."""
        raise NotImplementedError


@dataclass(frozen=True)
class GPT(Transformer):
    """A pre-LN GPT (Radford et al. 2019): LayerNorm, GELU, biases."""

    kind: Literal["gpt"] = field(default="gpt", kw_only=True)
    """gpt or llama; each has fields and defaults of its own"""
    mlp: Count = 4
    """width of a block's MLP in multiples of hidden"""

    @property
    def mlp_width(self) -> int:
        return self.mlp * self.hidden

    @property
    def mlp_matrices(self) -> int:
        return 2


@dataclass(frozen=True)
class Llama(Transformer):
    """A Llama (Touvron et al. 2023): RMSNorm, SwiGLU, RoPE, no biases; grouped queries (Ainslie et al. 2023)."""

    kind: Literal["llama"] = field(default="llama", kw_only=True)
    """gpt or llama; each has fields and defaults of its own"""
    positions: Positions = "rope"
    """learned, sinusoidal or hierarchical: added to embeddings; rope turns queries and keys, alibi biases scores"""
    kv_heads: Count | None = None
    """heads of keys and values, each shared by as many heads of queries: a divisor of heads; None is heads, 1 is MQA"""
    ffn: Count | None = None
    """width of a block's MLP; None is 8/3 of hidden, up to a multiple of 8: as many weights as a GPT's with mlp = 4"""
    norm_eps: Positive = 1e-5
    """added to the mean square that a norm divides by"""

    def faults(self, right: Callable[..., bool]) -> Iterator[str]:
        """What ``Transformer.faults`` finds, and heads of keys and values that don't divide those of queries."""
        yield from super().faults(right)
        if right("model.heads", "model.kv_heads") and self.heads % self.num_kv_heads:
            near = _divisor_near(self.num_kv_heads, self.heads)
            yield f"model.kv_heads {self.kv_heads} does not divide model.heads {self.heads}: use {near}, say"

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def mlp_width(self) -> int:
        return -(-self.hidden // 3) * 8 if self.ffn is None else self.ffn

    @property
    def mlp_matrices(self) -> int:
        return 3


@dataclass(frozen=True)
class Layers:
    """The user's own modules: ``fn()`` returns a list of nn.Modules that are applied one after the other.

    Replicas share their parameters; buffers, as the running statistics of a BatchNorm, are each replica's own.
    """

    fn: Callable[[], Sequence[Any]]
    """builds the list; each layer takes what the layer before it returned (a tensor or a tuple of tensors)"""
    loss: Callable[[Any, Any], Any]
    """``loss(output, target) -> scalar tensor``, the mean over the microbatch"""
    seq: Count | None = None
    """tokens a sequence, for a model over text; with other data leave it out"""
    vocab: Count = 256
    """token ids run from 0 to vocab - 1, for a model over text"""
    plan: Mapping[str, str] = field(default_factory=dict, hash=False)
    """how modules are divided over ``mesh.tp``, by patterns of their names ``layers.<i>.<name inside>``; ``*`` is one
    part. column divides an nn.Linear by outputs, row by inputs (outputs are summed), column_gather_output by outputs
    that are put together again; embedding divides an nn.Embedding by ids; dropout is an nn.Dropout between a column and
    a row, shared any other module there that has weights. All else is done alike by every actor"""
    halves: bool = False
    """whether nn.Linear layers may make the gradients of their weights later than those of their inputs, as W of a
    schedule, or where they are reduced, not copied there: the same bits, and faster, for modules that do nothing but
    call these layers: no forward and no hook may ask for gradients, and no hook write into one"""


def _divisor_near(wanted: int, whole: int) -> int:
    """The divisor of ``whole`` that is nearest to ``wanted``; of two the smaller."""
    wanted = min(wanted, whole)
    near = (number for gap in count() for number in (wanted - gap, wanted + gap))
    return next(number for number in near if number > 0 and whole % number == 0)
