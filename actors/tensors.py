"""In which order the elements of a tensor stand in memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def nbytes(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


def row_size(tensor: Tensor) -> int:
    """Elements of one row of dim 0."""
    return math.prod(tensor.shape[1:])


def staged(tensor: Tensor) -> tuple[Tensor, Callable[[], object] | None]:
    """A contiguous tensor to communicate with, and what copies the result back if it is not ``tensor`` itself."""
    if tensor.is_contiguous():
        return tensor, None
    flat = tensor.contiguous()
    return flat, lambda: tensor.copy_(flat)


Values = tuple[Tensor, ...]  # what flows from layer to layer


def as_values(output: object) -> Values:
    """A layer's output as a tuple of tensors; TypeError if it is anything else."""
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, (tuple, list)) and output and all(isinstance(value, Tensor) for value in output):
        return tuple(output)
    raise TypeError(f"a layer returned {type(output).__name__}: return a tensor or a tuple of tensors")


def unwrap(values: Values) -> Tensor | Values:
    """A single tensor by itself, several as a tuple: what a user's loss function is given."""
    return values[0] if len(values) == 1 else values


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
