"""What multiplies by a linear layer's weight: torch's own products, or oneDNN's where those are faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from raypar.actors.specs import LinearKind

_ONEDNN: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_LEAST = 1 << 26  # multiplications: below, oneDNN and a function of our own take longer to call than the kernels save
_ROWS = 16  # of an input: fewer are bound by memory


class Products(NamedTuple):
    """The two products that a linear layer's input and the gradient of its output go through, for a custom function.

    linear  x (..., in), weight (out, in) and bias (out,) or None -> x weight^T + bias (..., out), which is no view:
            into a view that a custom function returns autograd lets nobody write
    inner   gradient of the output (rows, out) and weight (out, in) -> gradient of the input (rows, in), differentiable
            where gradients are on: somebody wants gradients of gradients
    """

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    inner: Callable[[Tensor, Tensor], Tensor]


class Linear(nn.Linear):
    """``nn.Linear`` by oneDNN's products: (..., in) -> (..., out).

    Of float32 on a CPU, and from 67 million multiplications on; all else is ``nn.Linear``'s, and so is the gradient of
    the weight. Which of both makes a product depends on shapes and layouts alone, so bits are the same wherever a layer
    is called in the same way.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not (_undisturbed(input) and _serves(input, self.weight)):
            return super().forward(input)
        out: Tensor = _Linear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


def products_of(layer: nn.Linear) -> Products:
    """Those that a layer goes by."""
    return ONEDNN if isinstance(layer, Linear) else TORCH


class _Linear(torch.autograd.Function):
    """``F.linear`` by oneDNN's products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return ONEDNN.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_input, of_weight, of_bias = ctx.needs_input_grad
        return (
            ONEDNN.inner(rows, weight).view(x.shape) if of_input else None,
            torch.mm(rows.t(), x.flatten(0, -2)) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _serves(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN's product of ``x`` (..., k) and a weight of this size is there, and the faster one."""
    rows = math.prod(x.shape[:-1])
    return (
        _ONEDNN is not None
        and rows >= _ROWS
        and rows * weight.numel() >= _LEAST
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.is_contiguous()
        and weight.is_contiguous()
        and torch._C._get_mkldnn_enabled()
    )


def _undisturbed(x: Tensor) -> bool:
    """Whether torch does nothing else to a call than to compute it, and to keep what a backward needs."""
    return (
        type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()  # of modes, as that which counts FLOPs
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def _torchs_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _no_view(F.linear(x, weight, bias))


def _torchs_inner(rows: Tensor, weight: Tensor) -> Tensor:
    return rows @ weight


def _onednns_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _ONEDNN is None or not _serves(x, weight):
        return _torchs_linear(x, weight, bias)
    return _no_view(_ONEDNN(x, weight, bias, "none", [], ""))


def _onednns_inner(rows: Tensor, weight: Tensor) -> Tensor:
    if _ONEDNN is None or torch.is_grad_enabled() or not _serves(rows, weight):
        return _torchs_inner(rows, weight)
    return _ONEDNN(rows, weight.t(), None, "none", [], "")


def _no_view(out: Tensor) -> Tensor:
    return torch.ops.aten._unsafe_view.default(out, out.shape) if out._is_view() else out


TORCH = Products(_torchs_linear, _torchs_inner)
ONEDNN = Products(_onednns_linear, _onednns_inner)
LINEARS: Mapping[LinearKind, type[nn.Linear]] = {"onednn": Linear, "torch": nn.Linear}
