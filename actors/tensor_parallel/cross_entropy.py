"""Cross-entropy of logits whose vocabulary is sharded over a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raypar.actors.autograd.apply_function import apply_function
from raypar.actors.autograd.torch_private import demand_later
from raypar.actors.collective.group import Group
from raypar.actors.layers.linear_cross_entropy import Vocabulary
from raypar.actors.sharding import Shard
from raypar.actors.tensor_parallel.plan_guard import mark
from raypar.actors.tensors import finite_logs


def vocabulary_part(shard: Shard, group: Group) -> Vocabulary:
    """Return a member's part of the vocabulary, for a loss from slices of it.

    Three all_reduces of one number per token combine the members' sums, as those of ``vocab_parallel_cross_entropy``.

    Args:
        shard: This member's part of the vocabulary, along dim 0.
        group: The members.
    """

    def combine(sums: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        largest = sums.clone()
        group.all_reduce(largest, "max").wait()
        largest = finite_logs(largest)
        total = (sums - largest).exp_()
        group.all_reduce(total).wait()
        group.all_reduce(chosen).wait()
        return largest + total.log(), chosen

    return Vocabulary(shard.whole[0], shard.span(0)[0], combine)


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, shard: Shard, group: Group, ignored: int) -> Tensor:
    """Return the sum of -log softmax(logits)[label] over the tokens, a scalar, the same on every member.

    No member ever has the logits of the whole vocabulary.

    Args:
        logits: This member's part of the logits (T, own ids), where T is the number of tokens.
        labels: Labels (T,) int64, the same on every member.
        shard: This member's part of the vocabulary, along dim 0.
        group: The members.
        ignored: The label of tokens to leave out of the sum.

    Raises:
        RuntimeError: A label is not in the vocabulary (on a GPU the device fails, as with torch's own loss).
    """
    vocab = shard.whole[0]
    known = ((labels >= 0) & (labels < vocab)) | (labels == ignored)
    demand_later(known.all(), f"a label is out of bounds: give 0 to {vocab - 1}, or {ignored} to leave it out")
    return mark(apply_function(_CrossEntropy, logits, labels, shard.span(0), group, ignored), divided=False)


class _CrossEntropy(torch.autograd.Function):
    """The loss, with three all_reduces of one number per token: the largest logit, the sum of exponentials, and the
    label's logit.

    The backward needs no message: the gradient is the softmax, minus 1 at the label. Half-precision logits are computed
    in fp32.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, span: tuple[int, int], group: Group, ignored: int) -> Tensor:
        exact = logits if logits.dtype == torch.float64 else logits.float()
        largest = exact.amax(-1)
        group.all_reduce(largest, "max").wait()
        shifted = exact - largest.unsqueeze(-1)
        where = (labels - span[0]).clamp(0, span[1] - span[0] - 1).unsqueeze(-1)
        own = (labels >= span[0]) & (labels < span[1])
        label = shifted.gather(-1, where).squeeze(-1).masked_fill(~own, 0.0)
        total = shifted.exp_().sum(-1)
        group.all_reduce(total).wait()
        group.all_reduce(label).wait()
        counts = labels != ignored
        ctx.save_for_backward(shifted.div_(total.unsqueeze(-1)), where, own, counts)
        ctx.dtype = logits.dtype
        return (total.log() - label).masked_fill(~counts, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        softmax, where, own, counts = ctx.saved_tensors
        of_logits = softmax.scatter_add(-1, where, -own.unsqueeze(-1).to(softmax.dtype))
        of_logits = of_logits.mul_((counts * gradient).unsqueeze(-1))
        return of_logits.to(ctx.dtype), None, None, None, None
