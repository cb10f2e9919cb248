"""Cross-entropy of the outputs of a linear layer, computed from slices of the vocabulary.

The logits of a microbatch never exist whole: neither they nor their gradient have more elements at a time than one
slice. The forward keeps the logarithm of the sum of exponentials of every token, and the backward makes each slice's
logits again. Slices of the vocabulary, rather than chunks of tokens, make each row of the weight's gradient in one
product, so that it is neither rounded nor read and written once for each chunk.

Shapes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raypar.actors.autograd.apply_function import apply_function
from raypar.actors.autograd.torch_private import demand_later
from raypar.actors.layers.linear import GradientMemory, Products
from raypar.actors.tensors import Values, bent, finite_logs


class Vocabulary(NamedTuple):
    """An actor's part of the vocabulary.

    Attributes:
        size: Number of ids of the whole vocabulary.
        first: The first id of the part.
        combine: Takes, of each token, the log-sum-exp of the part's logits and the label's logit (0 if the label is not
            in the part), (T,) each. Returns those of the whole vocabulary. None if the part is the whole.
    """

    size: int
    first: int = 0
    combine: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None


class Labels:
    """The labels of the present microbatch, for the layer that computes their loss from slices of the vocabulary.

    A stage sets ``now`` before it runs its layers, also when it runs them again.

    Attributes:
        now: The labels, one tensor (B, S) int64; () if none of them counts, and None if no loss is computed.
        vocabulary: This actor's part of the vocabulary; None if logits must be computed whole.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.now: Values | None = None
        self.vocabulary: Vocabulary | None = vocabulary


class LossSpec(NamedTuple):
    """What a cross-entropy is computed of, beside tensors.

    Attributes:
        vocabulary: This actor's part of the vocabulary.
        width: Number of ids in a slice.
        ignored: The label of tokens that do not count.
        cap: Logits s become cap * tanh(s / cap); None: they do not.
        products: The matrix products to use.
        memory: Returns memory for the weight's gradient.
    """

    vocabulary: Vocabulary
    width: int
    ignored: int
    cap: float | None
    products: Products
    memory: GradientMemory


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, spec: LossSpec) -> Tensor:
    """Return -log softmax(x weight^T)[label] of each token in fp32 (fp64 of fp64), (T,); 0 where the label is ignored.

    Logits are rounded to the dtype of ``x``, as those of a linear layer are, and everything after them is computed in
    fp32. The gradients of the input and the weight are made by one backward.

    Args:
        x: The input (T, D).
        weight: This actor's part of the weight (own V, D), in the dtype of ``x``.
        labels: Labels (T,) int64.
        spec: What is computed.

    Raises:
        RuntimeError: A label is not in the vocabulary (on a GPU the device fails, as with torch's own loss).
    """
    size, ignored = spec.vocabulary.size, spec.ignored
    known = ((labels >= 0) & (labels < size)) | (labels == ignored)
    demand_later(known.all(), f"a label is out of bounds: give 0 to {size - 1}, or {ignored} to leave it out")
    return apply_function(_LinearCrossEntropy, x, weight, labels, spec)


class _LinearCrossEntropy(torch.autograd.Function):
    """The losses of tokens, slice by slice of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, spec: LossSpec) -> Tensor:
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        sums, chosen = x.new_full((len(x),), -torch.inf, dtype=exact), x.new_zeros(len(x), dtype=exact)
        for part, where, own in _slices(weight, labels, spec):
            logits = bent(spec.products.linear(x, weight[part], None), spec.cap).to(exact)
            chosen += logits.gather(-1, where).squeeze(-1).masked_fill(~own, 0.0)
            largest = finite_logs(logits.amax(-1))
            total = logits.sub_(largest.unsqueeze(-1)).exp_().sum(-1)
            sums = torch.logaddexp(sums, largest + total.log())
            del logits  # before the next ones are made
        if spec.vocabulary.combine is not None:
            sums, chosen = spec.vocabulary.combine(sums, chosen)
        ctx.spec, ctx.weight = spec, weight  # hooks of saved tensors return other objects
        ctx.save_for_backward(x, weight, labels, sums)
        return (sums - chosen).masked_fill_(labels == spec.ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, labels, sums = ctx.saved_tensors
        spec, of_weight = ctx.spec, None
        total = x.new_zeros(x.shape, dtype=sums.dtype) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            memory = spec.memory(ctx.weight)
            # detach makes a new Python object: autograd copies a gradient that anything else refers to
            of_weight = torch.empty_like(weight) if memory is None else memory.detach()
        scales = gradient.masked_fill(labels == spec.ignored, 0.0).unsqueeze(-1)
        for part, where, own in _slices(weight, labels, spec):
            logits = bent(spec.products.linear(x, weight[part], None), spec.cap)
            slopes = None if spec.cap is None else (logits / spec.cap).square_().neg_().add_(1)
            exact = logits.to(sums.dtype)
            del logits
            exact.sub_(sums.unsqueeze(-1)).exp_()
            exact.scatter_add_(-1, where, -own.unsqueeze(-1).to(exact.dtype)).mul_(scales)
            rows = (exact if slopes is None else exact.mul_(slopes)).to(x.dtype)
            del exact, slopes
            if total is not None:
                total += spec.products.inner(rows, weight[part])
            if of_weight is not None:
                torch.mm(rows.t(), x, out=of_weight[part])
            del rows  # before the next logits are made
        return None if total is None else total.to(x.dtype), of_weight, None, None


def _slices(weight: Tensor, labels: Tensor, spec: LossSpec) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the slices of this actor's part of the vocabulary.

    Yields:
        The rows of the weight, the index of each token's label in the slice (T, 1) (any index if it is not there), and
        whether it is there (T,).
    """
    for start in range(0, len(weight), spec.width):
        stop = min(start + spec.width, len(weight))
        there = labels - (spec.vocabulary.first + start)
        own = (there >= 0) & (there < stop - start)
        yield slice(start, stop), there.clamp(0, stop - start - 1).unsqueeze(-1), own
