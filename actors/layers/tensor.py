"""Linear layers and embeddings divided over a group, by their weights (Shoeybi et al. 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.cut import Cut, share_of
from raypar.actors.group import Group
from raypar.actors.layers.extent import mark
from raypar.actors.layers.ops import Move


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
