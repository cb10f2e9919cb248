"""Linear layers and embeddings divided over a group, by their weights (Shoeybi et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.collective.autograd import Move, all_gathered, begin_sum
from raypar.actors.collective.group import Group
from raypar.actors.layers.linear import Fan
from raypar.actors.sharding import Cut, share_of
from raypar.actors.tensor_parallel.plan_guard import mark


class ColumnParallelLinear(nn.Linear):
    """Some of the outputs of a linear layer: (..., in) -> (..., own outputs); the input comes by way of ``copy_to``.

    cut  what of the weight (out, in) is here; of the bias the same outputs
    """

    def __init__(self, whole: nn.Linear, cut: Cut) -> None:
        outputs, inputs = cut.shape
        super().__init__(inputs, outputs, whole.bias is not None, dtype=whole.weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        return mark(super().forward(input), divided=True)


class SharedLinear(nn.Linear):
    """Some of the outputs of a linear layer, whose weights are whole on every member: (..., in) -> (..., own outputs).

    Other members make other outputs, or the same ones; a member's gradients are partial.

    span  first and one behind the last output that this member makes
    """

    def __init__(self, whole: nn.Linear, span: tuple[int, int]) -> None:
        super().__init__(whole.in_features, whole.out_features, whole.bias is not None, dtype=whole.weight.dtype)
        self.span = slice(*span)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *own_outputs(self))


class RowParallelLinear(nn.Linear):
    """The outputs that some of the inputs of a linear layer make, summed: (..., own inputs) -> (..., out).

    cut    what of the weight (out, in) is here; the bias is replicated, and added once: behind the sum
    leave  what sums: ``reduce_from`` the group, say
    label  what it is called where a mistake is told
    """

    def __init__(self, whole: nn.Linear, cut: Cut, leave: Move) -> None:
        outputs, inputs = cut.shape
        super().__init__(inputs, outputs, whole.bias is not None, dtype=whole.weight.dtype)
        self.whole, self.leave, self.label = whole.in_features, leave, "a row linear layer"

    def forward(self, input: Tensor) -> Tensor:
        """Raises ValueError for inputs that are not divided as the weight is."""
        if input.shape[-1] != self.in_features:
            raise ValueError(
                f"{self.label} of {self.whole} inputs has {self.in_features} of them here and is given "
                f"{input.shape[-1]}: give it what a column linear layer of {self.whole} outputs has made"
            )
        out = self.leave(F.linear(input, self.weight))
        return mark(out if self.bias is None else out.add_(self.bias), divided=False)  # nobody else has it yet


class VocabParallelEmbedding(nn.Embedding):
    """The embeddings of some of the ids, summed with those of the others: ids (...) int64 -> (..., D).

    cut      which rows of the table (V, D) are here; a row for padding gets no gradient, as in torch
    leave    what sums: ``reduce_from`` the group, say
    weights  what makes these rows of what is here of them, if that is not all
    """

    def __init__(self, whole: nn.Embedding, cut: Cut, leave: Move, weights: Move | None = None) -> None:
        ids, width = cut.shape
        super().__init__(ids, width, dtype=whole.weight.dtype)
        (self.start, self.stop), self.ids = cut.spans[0], cut.whole[0]
        if whole.padding_idx is not None and self.start <= whole.padding_idx < self.stop:
            self.padding_idx = whole.padding_idx - self.start
        self.leave, self.weights = leave, weights

    def forward(self, input: Tensor) -> Tensor:
        """RuntimeError for ids that nobody has."""
        known = ((input >= 0) & (input < self.ids)).all()
        torch._assert_async(known, f"an id is out of bounds: the embedding has {self.ids}, counted from 0")
        foreign = (input < self.start) | (input >= self.stop)
        weight = self.weight if self.weights is None else self.weights(self.weight)
        own = F.embedding((input - self.start).masked_fill(foreign, 0), weight, self.padding_idx)
        return self.leave(own.masked_fill(foreign.unsqueeze(-1), 0.0))


def own_outputs(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The weight (own out, in) and the bias (own out,) that make what a linear layer makes here."""
    if not isinstance(linear, SharedLinear):
        return linear.weight, linear.bias
    return linear.weight[linear.span], None if linear.bias is None else linear.bias[linear.span]


def cut_of(whole: tuple[int, ...], dim: int, group: Group) -> Cut:
    """A member's share of a tensor along a dim; if shares can't be equal, the first ones are larger by one."""
    return Cut(whole, {dim: share_of(whole[dim], group.rank, group.size)})


class ColumnParallelFan(Fan):
    """As a Fan, of layers of which each member of ``group`` has some outputs.

    dim    along which the input is divided; None if it is replicated
    again  keep only the own part of a divided input, and gather it anew in the backward (Korthikanti et al. 2022,
           section 4.2.2); a stage sets it where it recomputes
    """

    def __init__(self, group: Group, dim: int | None) -> None:
        super().__init__()
        self.group, self.dim, self.again = group, dim, False

    def forward(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        return columns(x, [own_outputs(linear) for linear in linears], self.group, self.dim, again=self.again)


def columns(
    x: Tensor, layers: Sequence[tuple[Tensor, Tensor | None]], group: Group, dim: int | None, *, again: bool = False
) -> tuple[Tensor, ...]:
    """What layers of these weights (own out, in) and biases (own out,) make of one input (B, ..., in).

    As ``copy_to`` (``dim`` None) or ``all_gather`` and then ``linear``, but in the backward the weights' gradients are
    computed while that of the input is summed, as Megatron-LM does.
    """
    weights, biases = [weight for weight, _ in layers], [bias for _, bias in layers]
    outs: tuple[Tensor, ...] = _Columns.apply(group, dim, again, x, *weights, *biases)  # type: ignore[no-untyped-call]
    return outs


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, dim: int | None, again: bool, x: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        weights, biases = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        whole = x if dim is None else all_gathered(group, dim, x)
        ctx.group, ctx.dim, ctx.again = group, dim, again and dim is not None
        ctx.save_for_backward(x if ctx.again else whole, *weights)
        return tuple([F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        kept, *weights = ctx.saved_tensors
        rows = [gradient.flatten(0, -2) for gradient in gradients]
        total = rows[0] @ weights[0]
        for gradient, weight in zip(rows[1:], weights[1:], strict=True):
            total.addmm_(gradient, weight)
        handle, summed = begin_sum(ctx.group, total.view(*gradients[0].shape[:-1], -1), ctx.dim)
        whole = all_gathered(ctx.group, ctx.dim, kept) if ctx.again else kept
        inputs, wanted = whole.flatten(0, -2), ctx.needs_input_grad[4:]
        made: list[Tensor | None] = [
            gradient.t() @ inputs if wants else None for gradient, wants in zip(rows, wanted, strict=False)
        ]
        made += [gradient.sum(0) if wants else None for gradient, wants in zip(rows, wanted[len(rows) :], strict=True)]
        handle.wait()
        return None, None, None, summed, *made
