"""A linear layer whose weights and inputs are blocks on a square of members (SUMMA, van de Geijn & Watts 1997).

Member (i, j) of a q x q square is in row i and column j. Blocks travel along rows and columns, one of q at a time: of
others' a member has the one in use and the next. Products are added up where their sum belongs (Xu & You 2021,
algorithms 1 to 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raypar.actors.cut import Cut, share_of
from raypar.actors.group import Group


class SummaLinear(nn.Linear):
    """A block of a linear layer: (B/q, ..., own inputs) -> (B/q, ..., own outputs), divided by j in and out.

    cut  what of the weight (out, in) is here: outputs by i, inputs by j; of the bias the outputs by j
    row  the members with this i, by j
    col  the members with this j, by i
    """

    def __init__(self, whole: nn.Linear, cut: Cut, row: Group, col: Group) -> None:
        outputs, inputs = cut.shape
        super().__init__(inputs, outputs, bias=False, dtype=whole.weight.dtype)
        self.row, self.col = row, col
        self.shares = [stop - start for start, stop in (share_of(cut.whole[0], i, col.size) for i in range(col.size))]
        if whole.bias is not None:
            self.bias = nn.Parameter(torch.empty(self.shares[row.rank], dtype=whole.bias.dtype))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Product.apply(x, self.weight, self.row, self.col, self.shares)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    """x w^T. A member keeps its own blocks only: others' come again in the backward."""

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
    """Each member's tensor, by rank: while one is used the next one is under way."""

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
