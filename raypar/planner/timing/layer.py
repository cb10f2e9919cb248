"""The operations of a transformer's layer, embedding and head on one actor, for one microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.run import Run
from raypar.planner.memory.activations import ELEMENT_BYTES
from raypar.planner.timing.roofline import Product, Work

Kind = Literal["linear", "scores", "fused", "beside"]

#: Of the forward's FLOPs and bytes, what the backward of an operation that is no product takes: a fused attention also
#: makes its scores again; an operation on elements reads the gradient, what was kept, and writes a gradient.
_BACKWARD: dict[Kind, float] = {"fused": 2.5, "beside": 1.5}
_FP32 = ELEMENT_BYTES["fp32"]
_LOSS_PASSES = 3  # over fp32 logits, in the forward and again in the backward: largest, sum of exponentials, result


class LayerOperation(NamedTuple):
    """An operation of a layer.

    Attributes:
        name: What it is.
        kind: linear: a product with weights; scores: a product of attention; fused: attention in one operation; beside:
            an operation on elements.
        does: Its forward.
    """

    name: str
    kind: Kind
    does: Work | Product

    @property
    def work(self) -> Work:
        """FLOPs and bytes of its forward."""
        return self.does.work if isinstance(self.does, Product) else self.does

    @property
    def backward(self) -> tuple[Work | Product, ...]:
        """The operations of its backward."""
        if isinstance(self.does, Product):
            return self.does.of_left, self.does.of_right
        return (self.does.times(_BACKWARD[self.kind]),)

    @property
    def of_weights(self) -> Product | None:
        """The operation of its backward that makes the gradients of weights; None if it has none."""
        return self.does.of_right if self.kind == "linear" and isinstance(self.does, Product) else None

    @property
    def is_core(self) -> bool:
        """Whether it is of attention's core, which selective recomputation runs again."""
        return self.name in ("scores", "softmax", "dropout of scores", "values", "attention")


class _Sizes:
    """The sizes of a microbatch on an actor.

    Attributes:
        tokens: Its tokens.
        whole: Tokens of the parts that tensor ranks do not divide, unless along the sequence.
        ranks: Tensor ranks.
        element: Bytes of an element.
    """

    def __init__(self, run: Run, model: GPT | Llama) -> None:
        self.ranks = run.mesh.tensor_ranks
        self.tokens = run.micro_batch_size * model.seq / run.mesh.cp
        self.whole = self.tokens / self.ranks if run.sequence_parallel else self.tokens
        self.element = ELEMENT_BYTES[run.precision.layers]


def layer_parts(run: Run, model: GPT | Llama, num_experts: int = 0) -> tuple[LayerOperation, ...]:
    """Return the operations of a layer's forward.

    Args:
        run: The run, whose mesh, microbatch and precision say what an actor has of it.
        model: Its model.
        num_experts: Number of the layer's experts; 0 if it has an MLP.
    """
    sizes = _Sizes(run, model)
    mlp = _experts(run, model, num_experts, sizes) if num_experts else _mlp(model, model.mlp_width, sizes)
    return (*_attention(run, model, sizes), *mlp, *_around(model, sizes))


def _attention(run: Run, model: GPT | Llama, sizes: _Sizes) -> Iterator[LayerOperation]:
    """Yield the projections, rotations and the core of attention."""
    T = sizes.tokens
    h = model.hidden
    t = sizes.ranks
    e = sizes.element
    heads, width, keys = model.heads / t, model.head_size, max(model.num_kv_heads / t, 1.0)
    both = heads + keys
    yield LayerOperation("qkv", "linear", Product(T, width * (heads + 2 * keys), h, e))
    if model.positions == "rope":
        yield LayerOperation("rope", "beside", Work(0.0, 2 * e * T * width * both))
    if model.qk_norm:
        yield LayerOperation("norms of heads", "beside", Work(0.0, 2 * e * T * width * both))
    samples, seen = run.micro_batch_size * heads, model.seq
    rows = seen / run.mesh.cp
    if not is_materialised(model):  # one operation that skips what the causal mask hides, and writes no scores
        moved = e * T * width * (2 * heads + 2 * keys)
        yield LayerOperation("attention", "fused", Work(2.0 * samples * rows * seen * width, moved))
    else:
        scores = samples * rows * seen
        yield LayerOperation("scores", "scores", Product(rows, seen, width, e, samples))
        yield LayerOperation("softmax", "beside", Work(0.0, 2 * e * scores))
        if model.dropout:
            yield LayerOperation("dropout of scores", "beside", Work(0.0, (2 * e + 1) * scores))
        yield LayerOperation("values", "scores", Product(rows, width, seen, e, samples))
    yield LayerOperation("out", "linear", Product(T, h, width * heads, e))


def is_materialised(model: GPT | Llama) -> bool:
    """Return whether attention on a GPU writes the scores of all pairs of tokens."""
    return model.attention == "materialised" or (model.attention == "blocks" and model.dropout > 0)


def _mlp(model: GPT | Llama, width: float, sizes: _Sizes) -> Iterator[LayerOperation]:
    """Yield the operations of an MLP of a width, which tensor ranks divide."""
    T = sizes.tokens
    h = model.hidden
    own = width / sizes.ranks
    e = sizes.element
    for name in ("gate", "up")[3 - model.mlp_matrices :]:
        yield LayerOperation(name, "linear", Product(T, own, h, e))
    inside = 3 if model.is_gated else 2  # reads one or two, writes one
    yield LayerOperation("activation", "beside", Work(0.0, inside * e * T * own))
    yield LayerOperation("down", "linear", Product(T, h, own, e))


def _experts(run: Run, model: GPT | Llama, num_experts: int, sizes: _Sizes) -> Iterator[LayerOperation]:
    """Yield the operations of a layer with experts, at an even load."""
    moe = model.moe
    h = model.hidden
    e = sizes.element
    mesh = run.mesh
    assert moe is not None
    tokens = sizes.tokens / (sizes.ranks if mesh.folds_experts else 1)
    rows, held = tokens * moe.top_k, max(1, num_experts // mesh.expert_parts)
    width = model.expert_width / mesh.expert_ranks
    yield LayerOperation("router", "linear", Product(tokens, num_experts, h, e))
    yield LayerOperation("to and from experts", "beside", Work(0.0, 8 * e * rows * h, 4))
    for name in ("gate", "up", "down")[3 - model.mlp_matrices :]:
        columns, depth = (h, width) if name == "down" else (width, h)
        yield LayerOperation(f"experts' {name}", "linear", Product(rows / held, columns, depth, e, held))
    yield LayerOperation("activation", "beside", Work(0.0, (3 if model.is_gated else 2) * e * rows * width))
    if moe.shared:
        yield from _mlp(model, moe.shared * model.expert_width, sizes)
    if moe.residual:
        yield from _mlp(model, model.mlp_width, sizes)


def _around(model: GPT | Llama, sizes: _Sizes) -> Iterator[LayerOperation]:
    """Yield the norms, and the sums of both residual branches, with their dropout."""
    elements, e = sizes.whole * model.hidden, sizes.element
    yield LayerOperation("norms", "beside", Work(0.0, 2 * 2 * e * elements, 2))
    yield LayerOperation("residuals", "beside", Work(0.0, 2 * (3 * e + (1 if model.dropout else 0)) * elements, 2))


def embedding_parts(run: Run, model: GPT | Llama) -> tuple[LayerOperation, ...]:
    """Return the operations of the embedding's forward: rows are looked up, and dropped out."""
    sizes = _Sizes(run, model)
    each = (4 if model.dropout else 2) * sizes.element
    return (LayerOperation("embedding", "beside", Work(0.0, each * sizes.whole * model.hidden)),)


def head_parts(run: Run, model: GPT | Llama) -> tuple[LayerOperation, ...]:
    """Return the operations of the head's forward: a norm, logits, and the loss over them in fp32."""
    sizes = _Sizes(run, model)
    logits, e = sizes.tokens * model.vocab / sizes.ranks, sizes.element
    return (
        LayerOperation("norm", "beside", Work(0.0, 2 * e * sizes.whole * model.hidden)),
        LayerOperation("logits", "linear", Product(sizes.tokens, model.vocab / sizes.ranks, model.hidden, e)),
        LayerOperation("loss", "beside", Work(0.0, _LOSS_PASSES * _FP32 * logits, _LOSS_PASSES)),
    )
