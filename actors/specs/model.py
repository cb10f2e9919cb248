"""The model of a run as plain data: a GPT, a Llama, or the user's own layers. Imports no torch.

Frozen dataclasses can be compared, sent to actors, and written to and read from TOML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from raypar.actors.bounds import Count, Positive, Share, Some, Steps
from raypar.actors.known_fields import known_fields
from raypar.actors.specs.lora import OF_PARTS, Lora
from raypar.actors.specs.moe import MoE

Positions = Literal["learned", "sinusoidal", "hierarchical", "rope", "alibi"]
AttentionKind = Literal["blocks", "fused", "materialised"]
LinearKind = Literal["auto", "onednn", "torch"]
Gelu = Literal["exact", "tanh"]
Gate = Literal["silu", "gelu", "gelu_tanh"]
BLOCK_TOKENS = 64  # tokens in a block of queries
_SLICE_LOGITS = 1 << 26  # logits at a time of a loss that is computed from slices of the vocabulary
_SLICE_STEP = 128  # which widths of slices are multiples of
KEPT_SCORES_BYTES = 12 << 20  # bytes of scores that an actor keeps for backwards at most, by default
# Below these sizes torch's own kernel is faster.
BLOCKS_FROM_TOKENS = 256  # tokens in the sequence
BLOCKS_FROM_QUERIES = 2048  # queries of a sample, over all heads
ScalingKind = Literal["linear", "dynamic", "yarn", "llama3"]
_NO_NUMBER: float | None = None
_NO_ID: int | None = None


@known_fields(rope_type="kind", type="kind", original_max_position_embeddings="trained")
@dataclass(frozen=True)
class RopeScaling:
    """Slower rotations, so that positions beyond those of an earlier training rotate by known angles."""

    kind: ScalingKind = "linear"
    """linear: all angles divided by factor (Chen et al. 2023); dynamic: a larger base for sequences beyond trained
    (NTK-aware); yarn: slow pairs divided by factor, fast ones kept, and larger scores (Peng et al. 2023); llama3: by
    the wavelength of each pair (Llama team 2024)"""
    factor: Annotated[float, Ge(1.0)] = 1.0
    """how many times longer sequences become"""
    trained: Count | None = None
    """most tokens in a sequence of the earlier training; linear needs none"""
    low: Positive = 1.0
    """of llama3: pairs that turn fewer than low times in trained tokens are divided by factor"""
    high: Positive = 4.0
    """of llama3: pairs that turn more than high times in trained tokens stay"""
    fast: Positive = 32.0
    """of yarn: pairs that turn more than fast times in trained tokens stay"""
    slow: Positive = 1.0
    """of yarn: pairs that turn fewer than slow times in trained tokens are divided by factor"""
    truncate: bool = True
    """of yarn: whether the bounds between pairs are rounded to whole ones"""
    attention: Positive | None = None
    """of yarn: what queries and keys are multiplied by; None: 0.1 ln(factor) + 1"""

    def faults(self, positions: str) -> Iterator[str]:
        """Yield the fields that do not fit each other.

        Args:
            positions: The model's positions.
        """
        if positions != "rope":
            message = f"model.rope_scaling is given, but model.positions is {positions!r}"
            yield f"{message}: set positions to 'rope', or leave rope_scaling out"
        if self.kind != "linear" and self.trained is None:
            message = f"model.rope_scaling.trained is None, and {self.kind!r} goes by it"
            yield f"{message}: give the most tokens in a sequence of the earlier training"
        if self.kind == "llama3" and self.low >= self.high:
            message = f"model.rope_scaling.low is {self.low:g}, and high {self.high:g}"
            yield f"{message}: low must be less than high, as 1 and 4"
        if self.kind == "yarn" and self.slow >= self.fast:
            message = f"model.rope_scaling.slow is {self.slow:g}, and fast {self.fast:g}"
            yield f"{message}: slow must be less than fast, as 1 and 32"


@dataclass(frozen=True)
class Transformer:
    """Base of GPT and Llama: equal transformer blocks over tokens, which are bytes unless there is a tokenizer."""

    layers: Annotated[int, Ge(1), Le(100_000)] = 8
    """number of transformer blocks"""
    hidden: Count = 256
    """width of the residual stream"""
    heads: Count = 8
    """attention heads, a divisor of hidden"""
    seq: Count = 256
    """most tokens in a sequence"""
    vocab: Count = 256
    """token ids run from 0 to vocab - 1"""
    dropout: Share = 0.0
    """dropout probability after embeddings, in attention and on both residual branches"""
    tied: bool = False
    """one logical weight for the embedding and the head (Press & Wolf 2017)"""
    positions: Positions = "learned"
    """learned, sinusoidal or hierarchical: added to embeddings; rope: rotates queries and keys; alibi: biases scores"""
    rope_base: Positive = 10_000.0
    """base of rope's angles: the slowest pair rotates by about 1 / rope_base per token"""
    rope_scaling: RopeScaling | None = None
    """slower angles, for longer sequences than the weights were trained with"""
    attention: AttentionKind = "blocks"
    """fused: torch's kernel; blocks: the same, except in float32 on one CPU thread, where batched products for some
    queries at a time are faster and keep up to 12 MiB of scores per actor for the backward, and with dropout on GPUs,
    where it is materialised; materialised: keeps the scores of all pairs of tokens, as formulas count them. On GPUs
    fused draws dropout of its own, which tp and cp can't draw: their numbers are others"""
    linear: LinearKind = "auto"
    """library for float32 matrix products of linear layers on CPUs: torch: nn.Linear; onednn: oneDNN for large ones,
    some percent faster on an AMD EPYC; auto: torch on Intel processors, which MKL is made for, else onednn"""
    moe: MoE | None = None
    """experts in place of the MLPs of some blocks"""
    head_width: Count | None = None
    """width of a head; None: hidden / heads"""
    qkv_bias: bool = False
    """whether the projections to queries, keys and values have biases"""
    window: Count | None = None
    """tokens that a token attends to, itself and those right before it (Beltagy et al. 2020); None: all before it"""
    window_first: Steps = 0
    """with window, the first block that has it, counted from 0; the blocks before it attend to all tokens"""
    window_skips: Count | None = None
    """with window, every n-th block has full attention: 2: every second one; None: none does"""
    norm_eps: Positive = 1e-5
    """added to the variance in LayerNorm, or to the mean square in RMSNorm, against division by zero"""
    lora: Lora | None = None
    """low-rank adapters, which are trained instead of all weights; None: all weights learn"""
    hf: str | None = None
    """folder of a Hugging Face model whose weights the run begins with, as rp.HF("folder") gives it; None: random
    weights"""

    # No fields, but fixed by the class. Llama has fields of some of these names, which describe them.
    has_biases = False  # whether norms and linear layers have biases, but those of queries, keys, values and the head
    has_rms_norms = False  # whether norms are RMSNorms, which need no means; else they are LayerNorms
    is_gated = False  # whether MLPs have gates, a third matrix
    qk_norm = post_norms = False
    scaled_embedding = False
    query_scale = attention_cap = logit_cap = _NO_NUMBER
    kv_heads = pad_id = _NO_ID

    def faults(self, right: Callable[..., bool]) -> Iterator[str]:
        """Yield the sizes that do not fit each other, with the nearest ones that do.

        Args:
            right: Called with paths of a run's fields, returns whether these have valid values by themselves. Invalid
                sizes are not compared.
        """
        if self.moe is not None and right("model.moe", "model.layers", "model.seq"):
            yield from self.moe.faults(self.layers, self.seq)
            if self.lora is not None and right("model.lora") and not set(self.lora.layers) <= {*OF_PARTS["attn"]}:
                message = f"model.lora.targets is {self.lora.targets!r}, and experts have no adapters"
                yield f"{message}: use 'attn', or leave out model.moe"
        if self.lora is not None and right("model.lora"):
            yield from self.lora.faults(gated=self.is_gated)
        for name in ("window_first", "window_skips"):
            if getattr(self, name) and self.window is None and right("model.window", f"model.{name}"):
                message = f"model.{name} is {getattr(self, name)}, but there is no window"
                yield f"{message}: give model.window, or leave it out"
        if self.rope_scaling is not None and right("model.positions", "model.rope_scaling"):
            yield from self.rope_scaling.faults(self.positions)
        if not right("model.hidden", "model.heads", "model.head_width"):
            return
        if self.head_width is None and self.hidden % self.heads:
            heads, hidden = self._fitting()
            fix = f"set model.heads to {heads}, say" if hidden == self.hidden else f"set model.hidden to {hidden}, say"
            yield f"model.hidden {self.hidden} is not a multiple of model.heads {self.heads}: {fix}"
        elif right("model.positions") and self.positions == "rope" and self.head_size % 2:
            width = self.head_size
            field, even = ("hidden", self.heads * (width + 1)) if self.head_width is None else ("head_width", width + 1)
            fix = f"set model.{field} to {even}, say, or take other positions"
            yield f"model.positions is 'rope', which turns pairs, but a head has the odd width {width}: {fix}"

    def _fitting(self) -> tuple[int, int]:
        """Return heads and a hidden size that fit each other and the positions, with at most one of them changed.

        The heads change to the nearest number that fits, unless that is 1; else the hidden size changes.
        """
        if not self.hidden % self.heads:
            return self.heads, self.hidden
        even = 2 if self.positions == "rope" else 1
        heads = 1 if self.hidden % even else _divisor_near(self.heads, self.hidden // even)
        if heads > 1:
            return heads, self.hidden
        return self.heads, max(1, round(self.hidden / (self.heads * even))) * self.heads * even

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads if self.head_width is None else self.head_width

    def window_of(self, block: int) -> int | None:
        """Return the window of a block; None if its tokens attend to all before them.

        Args:
            block: Index of the block.
        """
        sees_all = block < self.window_first or (self.window_skips and (block + 1) % self.window_skips == 0)
        return None if sees_all else self.window

    def num_experts(self, block: int) -> int:
        """Return the number of experts of a block; 0 if it has an MLP instead.

        Args:
            block: Index of the block.
        """
        return 0 if self.moe is None else self.moe.num_experts(block, self.layers)

    @property
    def num_kv_heads(self) -> int:
        """Number of heads of the keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def mlp_matrices(self) -> int:
        """Number of weight matrices of hidden x mlp_width in an MLP."""
        return 3 if self.is_gated else 2

    @property
    def norms(self) -> int:
        """Number of norms of a block."""
        return 4 if self.post_norms else 2

    @property
    def expert_width(self) -> int:
        """Width of an expert."""
        return self.mlp_width if self.moe is None or self.moe.width is None else self.moe.width

    @property
    def mlp_width(self) -> int:
        """Width of a block's MLP."""
        raise NotImplementedError


@known_fields(ffn="mlp, the width of its MLP in multiples of hidden")
@dataclass(frozen=True)
class GPT(Transformer):
    """A pre-LN GPT (Radford et al. 2019): LayerNorm, GELU, biases."""

    kind: Literal["gpt"] = field(default="gpt", kw_only=True)
    """gpt or llama; each has fields and defaults of its own"""
    mlp: Count = 4
    """width of a block's MLP in multiples of hidden"""
    gelu: Gelu = "exact"
    """exact: x times the normal distribution function; tanh: its approximation, which GPT-2 was trained with"""

    has_biases = True

    @property
    def mlp_width(self) -> int:
        """Width of a block's MLP."""
        return self.mlp * self.hidden


@known_fields(mlp="ffn, the width of its MLP itself")
@dataclass(frozen=True)
class Llama(Transformer):
    """A Llama (Touvron et al. 2023): RMSNorm, SwiGLU, RoPE, no biases; grouped queries (Ainslie et al. 2023)."""

    kind: Literal["llama"] = field(default="llama", kw_only=True)
    """gpt or llama; each has fields and defaults of its own"""
    positions: Positions = "rope"
    """learned, sinusoidal or hierarchical: added to embeddings; rope: rotates queries and keys; alibi: biases scores"""
    kv_heads: Count | None = None
    """heads of keys and values, a divisor of heads; each serves heads / kv_heads query heads; None: heads, 1: MQA"""
    ffn: Count | None = None
    """width of a block's MLP; None: 8/3 of hidden, rounded up to a multiple of 8, as many weights as a GPT's MLP"""
    qk_norm: bool = False
    """whether the queries and the keys of every head pass an RMSNorm each, ahead of rope (Dehghani et al. 2023)"""
    gate: Gate = "silu"
    """what the gates of MLPs and experts pass; gelu_tanh approximates gelu, as Gemma does"""
    post_norms: bool = False
    """whether attention and MLP also end with an RMSNorm each, before they are added to the residual stream, as in
    Gemma 2 (Gemma team 2024)"""
    scaled_embedding: bool = False
    """whether the vectors of tokens are multiplied by the square root of hidden (Vaswani et al. 2017, section 3.4)"""
    query_scale: Positive | None = None
    """scores are divided by its square root; None: by that of a head's width"""
    attention_cap: Positive | None = None
    """scores s become cap * tanh(s / cap), so none is larger (Gemma team 2024); this needs attention "materialised" """
    logit_cap: Positive | None = None
    """logits s become cap * tanh(s / cap)"""
    pad_id: Some | None = None
    """the token of padding, whose vector gets no gradient where it is an input, as in models of transformers; None:
    every vector gets one"""

    has_rms_norms = True
    is_gated = True

    def faults(self, right: Callable[..., bool]) -> Iterator[str]:
        """Yield what ``Transformer.faults`` yields, and a fault if kv_heads does not divide heads."""
        yield from super().faults(right)
        heads = self._fitting()[0] if right("model.heads", "model.hidden", "model.positions") else self.heads
        if right("model.heads", "model.kv_heads") and heads % (self.kv_heads or heads):
            near = _divisor_near(self.kv_heads or heads, heads)
            which = "model.heads" if heads == self.heads else "those"
            yield f"model.kv_heads {self.kv_heads} does not divide {which} {heads}: set model.kv_heads to {near}, say"
        if right("model.attention", "model.attention_cap") and self.attention_cap and self.attention != "materialised":
            message = f"model.attention is {self.attention!r}, and model.attention_cap changes every score"
            yield f"{message}: set model.attention to 'materialised'"
        if right("model.vocab", "model.pad_id") and self.pad_id is not None and self.pad_id >= self.vocab:
            yield f"model.pad_id is {self.pad_id}, and the model's ids are 0 to {self.vocab - 1}: give one of them"

    @property
    def mlp_width(self) -> int:
        """Width of a block's MLP."""
        return -(-self.hidden // 3) * 8 if self.ffn is None else self.ffn


@known_fields()
@dataclass(frozen=True)
class Layers:
    """The user's own modules: ``fn()`` returns a list of nn.Modules that are applied one after the other.

    Replicas have the same parameters. Buffers, such as a BatchNorm's running statistics, differ between replicas.
    """

    fn: Callable[[], Sequence[Any]]
    """builds the list; each layer gets what the layer before it returned (a tensor or a tuple of tensors)"""
    loss: Callable[[Any, Any], Any]
    """``loss(output, target) -> scalar tensor``, the mean over the microbatch"""
    seq: Count | None = None
    """tokens in a sequence, for a model over text; leave it out for other data"""
    vocab: Count = 256
    """token ids run from 0 to vocab - 1, for a model over text"""
    plan: Mapping[str, str] = field(default_factory=dict, hash=False)
    """how to divide modules over ``mesh.tp``: a style for each pattern of names ``layers.<i>.<name inside>``, in which
    ``*`` stands for one part. Styles: column divides an nn.Linear by outputs; row divides one by inputs and sums the
    outputs; column_gather_output divides one by outputs and gathers them again; column_gather_input is a column that is
    given a part, row_split_input a row that is given all; embedding divides an nn.Embedding by ids; dropout is for an
    nn.Dropout between a column and a row, and shared for any other module with weights there; split0 lets each actor
    compute its samples, split1 its tokens, and replicated all. "from" and "to" with a placement say how an input comes
    and an output goes, as "column from S0 to R". Every actor computes all other modules in full"""
    skips: Sequence[tuple[int, int]] = field(default=(), hash=False)
    """pairs of layers, (0, 3): what layer 0 returns, one tensor, layer 3 takes too, as a further argument: after what
    the layer before it returned, and in the order of the pairs. It goes straight from one's actor to the other's"""
    halves: bool = False
    """whether weight gradients may be computed separately: later, as the W of a schedule, and those of nn.Linear layers
    also directly in the buffer in which they are reduced. This is faster and gives the same bits. It requires that
    modules just call their layers: no forward or hook may compute gradients, and no hook may change one"""
    hf: str | None = None
    """folder of a Hugging Face model whose weights the layers begin with, as rp.HF("folder") gives it; None: what fn
    gives them"""
    count: Callable[[Any], int] | None = None
    """``count(target) -> int``: of how many elements the loss of a microbatch is the mean, by which microbatches are
    weighted; None: the elements of the target, without those that are -100 if they are integers. Of a tuple of targets
    only the first is counted, while ``count`` is called with the tuple"""
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict, hash=False)
    """what an evaluation returns besides the loss, by name: ``fn(output, target)`` returns a mean over what the loss
    counts, or (sum, number of what is summed)"""

    @property
    def computes_again(self) -> bool:
        """Whether they generate text but, as modules of transformers, compute the whole text again for every token."""
        return self.seq is not None and bool(getattr(self.fn, "is_causal", False))

    @property
    def goes_by_length(self) -> bool:
        """Whether the output for a token depends on the text's length, so that texts are computed one by one."""
        return bool(getattr(self.fn, "goes_by_length", False))


def vocabulary_slice(num_tokens: float, vocab: int) -> int | None:
    """Return how many ids a slice has if a cross-entropy is computed from slices of the vocabulary.

    It depends on nothing but these sizes, so that layouts do not change numbers.

    Args:
        num_tokens: Number of tokens of a microbatch on an actor.
        vocab: Size of the whole vocabulary, also if actors divide it.

    Returns:
        The number of ids; None if there are so few logits that they are computed whole.
    """
    if num_tokens * vocab <= _SLICE_LOGITS:
        return None
    return max(1, int(_SLICE_LOGITS / num_tokens) // _SLICE_STEP) * _SLICE_STEP


def _divisor_near(wanted: int, whole: int) -> int:
    """Return the divisor of ``whole`` that is nearest to ``wanted``, the smaller of two."""
    wanted = min(wanted, whole)
    near = (number for gap in count() for number in (wanted - gap, wanted + gap))
    return next(number for number in near if number > 0 and whole % number == 0)
