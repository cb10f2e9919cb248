"""A linear layer whose weights and inputs are blocks on a square of members (SUMMA, van de Geijn & Watts 1997).

Member (i, j) of a q x q square is in row i and column j. Blocks travel along rows and columns, one of q at a time: of
others' a member has the one in use and the next. Products are added up where their sum belongs (Xu & You 2021,
algorithms 1 to 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raypar.actors.collective.autograd import reduce_scatter
from raypar.actors.collective.group import Group
from raypar.actors.models.base import Model
from raypar.actors.models.parallel_plan import Made
from raypar.actors.sharding import Cut, share_of
from raypar.actors.tensor_parallel.grid.base import GridParallel, Spread, portion_of
from raypar.actors.tensor_parallel.linear import VocabParallelEmbedding


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


class SquareParallel(GridParallel):
    """2D as in Optimus (Xu & You 2021), 2.5D as in Tesseract (Wang et al. 2021).

    In member (i, j) of a q x q square are the samples i and the features j of every activation, and of every matrix the
    block of outputs i and inputs j. Of d squares each takes a part of the batch, with weights of its own, whose
    gradients are summed once a step.

    groups  ``tp.row``, ``tp.col`` and, if there are several squares, ``tp.depth``, by key
    """

    def __init__(self, model: Model, groups: Mapping[str, Group]) -> None:
        self.row, self.col = groups["tp.row"], groups["tp.col"]
        self.behind = (groups["tp.depth"],) if "tp.depth" in groups else ()
        spread = Spread((*self.behind, self.col), self.row)
        super().__init__(model, (*self.behind, self.col, self.row), spread, spread)

    def embedding(self, module: nn.Embedding) -> Made:
        """The own ids' vectors for all tokens of the square, then those of the own tokens, summed."""
        cut = self.cut(tuple(module.weight.shape), {0: (self.col,), 1: (self.row,)})
        made = VocabParallelEmbedding(module, cut, partial(reduce_scatter, group=self.col, dim=0))
        square = portion_of(self.behind)
        made.register_forward_pre_hook(lambda _, inputs: (square.take(inputs[0], 0),))
        return Made(made, {"weight": cut}, {"weight": self.alike(self.col, self.row)})

    def linear(self, module: nn.Linear, inputs: Spread, outputs: Spread) -> Made:
        """Inside and outside are divided alike."""
        cut = self.cut(tuple(module.weight.shape), {0: (self.col,), 1: (self.row,)})
        made = SummaLinear(module, cut, self.row, self.col)
        cuts, partials = {"weight": cut}, {"weight": self.alike(self.col, self.row)}
        if module.bias is not None:
            cuts["bias"] = self.cut(tuple(module.bias.shape), {0: (self.row,)})
            partials["bias"] = self.alike(self.row)
        return Made(made, cuts, partials)
