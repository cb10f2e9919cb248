"""In which order the elements of a tensor stand in memory."""

from __future__ import annotations

import torch
from torch import Tensor

Order = tuple[int, ...]  # dims from the outermost to the innermost


def order_of(tensor: Tensor) -> Order:
    """The order in which the dims of a tensor stand; if its elements do not fill their memory, that of a new one."""
    order = _by_stride(tensor)
    return order if tensor.permute(order).is_contiguous() else tuple(range(tensor.dim()))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor fill their memory, in whatever order of dims."""
    return tensor.permute(_by_stride(tensor)).is_contiguous()


def empty_in(shape: tuple[int, ...], order: Order, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor whose elements stand in this order."""
    dims = [order.index(dim) for dim in range(len(order))]
    return torch.empty([shape[dim] for dim in order], dtype=dtype, device=device).permute(dims)


def _by_stride(tensor: Tensor) -> Order:
    return tuple(sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True))
