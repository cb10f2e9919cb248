"""2D and 2.5D tensor parallelism: weights and activations are blocks on a q x q square of members.

The product is SUMMA (van de Geijn & Watts 1997). Member (i, j) is in row i and column j. Blocks travel along rows and
columns, one of q at a time: of other members' blocks a member holds the one in use and the next one. Products are
summed on the member that holds the result (Xu & You 2021, algorithms 1 to 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raypar.actors.autograd.apply_function import apply_function
from raypar.actors.collective.autograd import reduce_scatter
from raypar.actors.collective.group import Group
from raypar.actors.layers.linear import Postponer, Use
from raypar.actors.models.parallel_style import Applied, AxisStyles, ParallelStyle
from raypar.actors.sharding import Pieces, Shard
from raypar.actors.tensor_parallel.grid.base import GridAxes, GridLayout, grid_styles, pieces_along, shard_along
from raypar.actors.tensor_parallel.linear import PostponableLinear, VocabParallelEmbedding


class SummaLinear(PostponableLinear):
    """A block of a linear layer: (B/q, ..., own inputs) -> (B/q, ..., own outputs).

    Inputs and outputs are sharded by j.

    Args:
        whole: The layer to shard.
        shard: This member's block of the weight (out, in), whose outputs are sharded by i and inputs by j. The bias is
            sharded by j.
        row: The members with the same i; ranks are j.
        col: The members with the same j; ranks are i.
    """

    def __init__(self, whole: nn.Linear, shard: Shard, row: Group, col: Group) -> None:
        super().__init__(whole, shard, bias=False)
        self.row, self.col = row, col
        spans = [Pieces.at(i, col.size).span(shard.whole[0]) for i in range(col.size)]
        self.shares = [stop - start for start, stop in spans]  # outputs of each i
        if whole.bias is not None:
            self.bias = nn.Parameter(torch.empty(self.shares[row.rank], dtype=whole.bias.dtype))

    def forward(self, x: Tensor) -> Tensor:
        later = self.later(x)
        seen = self.weight if later is None else later.anchor
        out = apply_function(_Product, x, seen, self, later)
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    """x w^T. The forward keeps only the member's own blocks; the others are sent again in the backward.

    ``seen`` is w, or the anchor of ``later``. What is left for later needs the gradients of the row once more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor, layer: SummaLinear, later: Postponer | None) -> Tensor:
        weight, row = layer.weight, layer.row
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.later, ctx.weight = layer, later, weight  # hooks of saved tensors return another object
        x_TI, parts = x.flatten(0, -2), []
        for root, w_OI in enumerate(_in_turn(weight, layer.col, _blocks(layer))):
            part_TO = x_TI @ w_OI.T
            row.reduce(part_TO, root).wait()
            if root == row.rank:
                parts.append(part_TO)
        return parts[0].view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), layer, later = ctx.saved_tensors, ctx.layer, ctx.later
        x_TI, y_TO = x.flatten(0, -2), gradient.flatten(0, -2)
        back_TI = torch.zeros_like(x_TI)
        blocks = _in_turn(weight, layer.col, _blocks(layer))
        made = _gradients(layer, y_TO, x_TI, (back_TI, blocks), of_weight=later is None)
        if later is not None:
            later.postpone(ctx.weight, None, Use(x_TI.detach(), y_TO, partial(_of_weight, layer)))
        return back_TI.view_as(x), made, None, None


def _gradients(
    layer: SummaLinear,
    y_TO: Tensor,
    x_TI: Tensor,
    back: tuple[Tensor, Iterator[Tensor]] | None = None,
    *,
    of_weight: bool = True,
) -> Tensor | None:
    """Compute gradients of a layer, while the gradients of the outputs go round the row once.

    Args:
        layer: The layer.
        y_TO: The gradient of this member's outputs.
        x_TI: Its inputs.
        back: Zeros, to which the gradient of the inputs is added, and the column's blocks of the weight; None: it is
            not wanted.
        of_weight: Whether the gradient of this member's block of the weight is wanted.

    Returns:
        The gradient of the block; None if it is not wanted.
    """
    made = None
    for root, theirs_TO in enumerate(_in_turn(y_TO, layer.row, [(len(y_TO), share) for share in layer.shares])):
        if back is not None:
            back[0].addmm_(theirs_TO, next(back[1]))
        if of_weight:
            part_OI = theirs_TO.T @ x_TI
            layer.col.reduce(part_OI, root).wait()
            made = part_OI if root == layer.col.rank else made
    return made


def _of_weight(layer: SummaLinear, y_TO: Tensor, x_TI: Tensor) -> Tensor:
    made = _gradients(layer, y_TO, x_TI)
    assert made is not None
    return made


def _blocks(layer: SummaLinear) -> list[tuple[int, int]]:
    """Return the shape of the weight's block of each member of the column."""
    return [(share, layer.weight.shape[1]) for share in layer.shares]


def _in_turn(own: Tensor, group: Group, shapes: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """Yield the matrix of each member, by rank. While one is used, the next one is on its way.

    Args:
        own: This member's matrix.
        group: The members.
        shapes: The shape of each member's matrix, by rank.
    """

    def start(root: int) -> tuple[Tensor, Any]:
        block = own.detach().contiguous() if root == group.rank else own.new_empty(shapes[root])
        return block, group.broadcast(block, root)

    coming = start(0)
    for root in range(group.size):
        block, handle = coming
        if root + 1 < group.size:
            coming = start(root + 1)
        handle.wait()
        yield block


def summa_styles(groups: Mapping[str, Group]) -> AxisStyles:
    """Return the styles of 2D (Optimus: Xu & You 2021) or 2.5D tensor parallelism (Tesseract: Wang et al. 2021).

    Member (i, j) of a q x q square holds the samples i and the features j of every activation, and the block of outputs
    i and inputs j of every matrix. With d squares (2.5D), each square takes a part of the batch and holds all weights,
    whose gradients are summed over the squares once a step.

    Args:
        groups: This rank's groups ``tp.row`` and ``tp.col``, and ``tp.depth`` if there are several squares, by key.
    """
    row, col = groups["tp.row"], groups["tp.col"]
    depth = (groups["tp.depth"],) if "tp.depth" in groups else ()
    axes = GridAxes((*depth, col), row)
    layout = GridLayout((*depth, col, row), axes, axes)
    return grid_styles(layout, SummaEmbedding(layout), partial(_linear, layout))


@dataclass(frozen=True)
class SummaEmbedding(ParallelStyle):
    """Shard an embedding by ids and by features.

    A member embeds the tokens of its whole square with the ids that it holds. Then the vectors are summed along the
    column, and each member gets those of its own tokens.

    """

    layout: GridLayout

    def apply(self, name: str, module: nn.Module) -> Applied:
        """Replace the embedding."""
        assert isinstance(module, nn.Embedding)
        *depth, col, row = self.layout.axes
        weight = shard_along(module.weight.shape, {0: (col,), 1: (row,)})
        made = VocabParallelEmbedding(module, weight, partial(reduce_scatter, group=col, dim=0))
        square = pieces_along(tuple(depth))
        made.register_forward_pre_hook(lambda _, inputs: (square.take(inputs[0], 0),))
        same = {"weight": self.layout.same_along(col, row)}
        return Applied(made, {"weight": weight}, same, {"": self.layout.flow})


def _linear(layout: GridLayout, module: nn.Linear, inputs: GridAxes, outputs: GridAxes) -> Applied:
    """Shard a linear layer; its inputs and outputs are sharded alike."""
    *_, col, row = layout.axes
    weight = shard_along(module.weight.shape, {0: (col,), 1: (row,)})
    shards, partials = {"weight": weight}, {"weight": layout.same_along(col, row)}
    if module.bias is not None:
        shards["bias"], partials["bias"] = shard_along(module.bias.shape, {0: (row,)}), layout.same_along(row)
    return Applied(SummaLinear(module, weight, row, col), shards, partials)
