"""Reductions over the members' tensors in rank order, for the backends that compute them on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

ReduceOp = Literal["sum", "product", "min", "max"]
REDUCTIONS: dict[ReduceOp, Callable[..., object]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def reduce_in_order(parts: Sequence[Tensor], op: ReduceOp, out: Tensor) -> None:
    """Reduce ``parts`` into ``out`` from first to last. Half-precision sums and products run in fp32."""
    half = out.dtype in (torch.bfloat16, torch.float16)
    total = parts[0].float() if half else parts[0].clone()
    for part in parts[1:]:
        REDUCTIONS[op](total, part, out=total)
    out.copy_(total.view_as(out))
