"""Linear layers of one input whose outputs are divided over a group, with their communication hidden behind compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.fan import Fan
from raypar.actors.group import Group
from raypar.actors.layers.ops import all_gathered, begin_sum
from raypar.actors.layers.tensor import own_outputs


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
