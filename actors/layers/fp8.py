"""Linear layers whose matrix products are in fp8, with a scale for each row of a factor.

A product rounds both factors to E4M3 (Micikevicius et al. 2022) when it is computed ("dynamic scaling"), along the dim
that it sums over: a row of activations or of gradients, and an output or an input of the weight. Results have the dtype
of the input. The gradients of weights are not in fp8, as in torchao's recipe ``rowwise_with_gw_hp``. Scales are powers
of two, so another scale rounds a number to the same one, unless it is less than 2^-13 of the largest in its row. So a
row can be divided over actors without a message for its largest number.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from raypar.actors.autograd.torch_private import as_no_view
from raypar.actors.layers.linear import Products, ProductsLinear, linear_product
from raypar.actors.specs.precision import FP8_CAPABILITY

_DTYPE = torch.float8_e4m3fn
_MOST = torch.finfo(_DTYPE).max
_LEAST = 2.0**-100  # of the largest number of a row, so that a row of zeros has a scale
_EXPONENT = 0x7F80_0000  # the bits of a float32's exponent


def to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to fp8, each with its scale: the largest power of two with which no number is too large.

    Args:
        rows: (..., n), floating-point. A row with infinite numbers or NaN makes a product that is not finite.

    Returns:
        The rounded rows times their scales, (..., n) fp8, and one over the scales, (..., 1) float32.
    """
    largest = rows.abs().amax(-1, keepdim=True).float().clamp(min=_LEAST)
    scale = ((_MOST / largest).view(torch.int32) & _EXPONENT).view(torch.float32)
    return (rows.float() * scale).to(_DTYPE), scale.reciprocal()


def rounded(rows: Tensor) -> Tensor:
    """Return rows (..., n) as they are after rounding to fp8, in their own dtype, which holds these numbers exactly."""
    values, factor = to_fp8(rows)
    return (values.float() * factor).to(rows.dtype)


def multiplies_fp8(device: torch.device) -> bool:
    """Return whether a device multiplies numbers in fp8; otherwise products are those of rounded numbers."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if multiplies_fp8(x.device):
        return as_no_view(_scaled_product(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], len(weight)))
    return as_no_view(F.linear(rounded(x), rounded(weight), bias))


def _inner(rows: Tensor, weight: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return linear_product(FP8, rows, weight.t(), None)
    return _linear(rows, weight.t(), None)


def _scaled_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute rows (n, in) by a weight (out, in), plus a bias, on a GPU: (n, out)."""
    if not len(rows):  # an expert without tokens
        return rows.new_empty((0, len(weight)))
    left, of_left = to_fp8(rows.contiguous())
    right, of_right = to_fp8(weight.contiguous())
    kind = F.ScalingType.RowWise
    # Fast accumulation keeps fewer bits than fp32. torchao's rowwise recipe has it too: the kernel is slow without it.
    return F.scaled_mm(
        left, right.t(), of_left, kind, of_right.t(), kind, bias=bias, output_dtype=rows.dtype, use_fast_accum=True
    )


FP8 = Products(_linear, _inner)


class Fp8Linear(ProductsLinear):
    """``nn.Linear`` with products in fp8: (..., in) -> (..., out). Its parameters are not in fp8."""

    products = FP8

    def forward(self, input: Tensor) -> Tensor:
        return linear_product(self.products, input, self.weight, self.bias)
