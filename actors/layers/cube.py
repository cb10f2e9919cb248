"""A linear layer whose weights and inputs are parts on a cube of members (Bian et al. 2021)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.cut import Cut
from raypar.actors.group import Group
from raypar.actors.layers.ops import all_gathered, reduce_scatter, reduce_scattered


class CubeLinear(nn.Linear):
    """A part of a linear layer: some of its inputs make parts of some of its outputs, which are summed.

    (b, ..., own inputs) -> (b / size of ``inputs``, ..., own outputs).

    cut      what of the weight (out, in) is here; of the bias the outputs ``bias``
    inputs   the members that have the other inputs
    weights  the members that have the other parts of these inputs' weights
    """

    def __init__(self, whole: nn.Linear, cut: Cut, bias: Cut | None, *, inputs: Group, weights: Group) -> None:
        outputs, held = cut.shape
        super().__init__(held, outputs, bias=False, dtype=whole.weight.dtype)
        if bias is not None:
            self.bias = nn.Parameter(torch.empty(bias.shape, dtype=whole.bias.dtype))
        self.inputs, self.weights = inputs, weights

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Product.apply(x, self.weight, self.weights)  # type: ignore[no-untyped-call]
        out = reduce_scatter(made, self.inputs, 0)
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    """x w^T, of w the members have parts along the inputs. A member keeps its own: others' come again in the backward.

    The members' gradients of w are partial, and each gets the sum for its part.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, all_gathered(group, 1, weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        back = gradient @ all_gathered(ctx.group, 1, weight)
        made = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        return back, reduce_scattered(ctx.group, 1, made), None
