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

from raypar.actors.collective.autograd import reduce_scatter
from raypar.actors.collective.group import Group, Groups
from raypar.actors.models.parallel_style import Applied, AxisStyles, ParallelStyle
from raypar.actors.sharding import Pieces, Shard
from raypar.actors.tensor_parallel.grid.base import GridAxes, GridLayout, grid_styles, pieces_along, shard_along
from raypar.actors.tensor_parallel.linear import VocabParallelEmbedding


class SummaLinear(nn.Linear):
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
        outputs, inputs = shard.shape
        super().__init__(inputs, outputs, bias=False, dtype=whole.weight.dtype)
        self.row, self.col = row, col
        spans = [Pieces.at(i, col.size).span(shard.whole[0]) for i in range(col.size)]
        self.shares = [stop - start for start, stop in spans]  # outputs of each i
        if whole.bias is not None:
            self.bias = nn.Parameter(torch.empty(self.shares[row.rank], dtype=whole.bias.dtype))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Product.apply(x, self.weight, self.row, self.col, self.shares)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    """x w^T. The forward keeps only the member's own blocks; the others are sent again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, row: Group, col: Group, shares: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.row, ctx.col, ctx.shares = row, col, shares
        x_TI, parts = x.flatten(0, -2), []
        for root, w_OI in enumerate(_in_turn(weight, col, [(share, weight.shape[1]) for share in shares])):
            part_TO = x_TI @ w_OI.T
            row.reduce(part_TO, root).wait()
            if root == row.rank:
                parts.append(part_TO)
        return parts[0].view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_TI, y_TO, parts = x.flatten(0, -2), gradient.flatten(0, -2), []
        back_TI = torch.zeros_like(x_TI)
        gradients = _in_turn(y_TO, ctx.row, [(len(x_TI), share) for share in ctx.shares])
        weights = _in_turn(weight, ctx.col, [(share, weight.shape[1]) for share in ctx.shares])
        for root, (y_TO, w_OI) in enumerate(zip(gradients, weights, strict=True)):
            back_TI.addmm_(y_TO, w_OI)
            part_OI = y_TO.T @ x_TI
            ctx.col.reduce(part_OI, root).wait()
            if root == ctx.col.rank:
                parts.append(part_OI)
        return back_TI.view_as(x), parts[0], None, None, None


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
    return grid_styles(layout, SummaEmbedding(layout, row, col, depth), partial(_linear, layout, row, col))


@dataclass(frozen=True)
class SummaEmbedding(ParallelStyle):
    """Shard an embedding by ids and by features.

    A member embeds the tokens of its whole square with the ids that it holds. Then the vectors are summed along the
    column, and each member gets those of its own tokens.

    Attributes:
        layout: How the grid shards activations.
        row: This member's group along its row.
        col: This member's group along its column.
        depth: This member's group along the squares, if there are several.
    """

    layout: GridLayout
    row: Group
    col: Group
    depth: Groups

    def apply(self, name: str, module: nn.Module) -> Applied:
        assert isinstance(module, nn.Embedding)
        weight = shard_along(module.weight.shape, {0: (self.col,), 1: (self.row,)})
        made = VocabParallelEmbedding(module, weight, partial(reduce_scatter, group=self.col, dim=0))
        square = pieces_along(self.depth)
        made.register_forward_pre_hook(lambda _, inputs: (square.take(inputs[0], 0),))
        same = self.layout.same_along(self.col, self.row)
        return Applied(made, {"weight": weight}, {"weight": same}, {"": self.layout.flow})


def _linear(
    layout: GridLayout, row: Group, col: Group, module: nn.Linear, inputs: GridAxes, outputs: GridAxes
) -> Applied:
    """Shard a linear layer; its inputs and outputs are sharded alike."""
    weight = shard_along(module.weight.shape, {0: (col,), 1: (row,)})
    shards, partials = {"weight": weight}, {"weight": layout.same_along(col, row)}
    if module.bias is not None:
        shards["bias"], partials["bias"] = shard_along(module.bias.shape, {0: (row,)}), layout.same_along(row)
    return Applied(SummaLinear(module, weight, row, col), shards, partials)
