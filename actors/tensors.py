"""Helpers for tensors: sizes, and memory order."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from raypar.actors.specs.precision import DType

_DTYPES: dict[DType, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(word: DType) -> torch.dtype:
    """Return torch's dtype for a run's word."""
    return _DTYPES[word]


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that torch would allocate for a tensor like this, which are dense even if it has gaps."""
    return torch.empty_like(tensor, device="meta").stride()


def row_size(tensor: Tensor) -> int:
    """Return the number of elements in one row of dim 0."""
    return math.prod(tensor.shape[1:])


Values = tuple[Tensor, ...]  # the inputs or outputs of a layer


def as_values(output: object, giver: str = "a layer") -> Values:
    """Return the output of a user's layer or function as a tuple of tensors.

    Args:
        output: A tensor, or a tuple or list of one or more tensors.
        giver: The layer or function, for the error.

    Raises:
        TypeError: It is anything else.
    """
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, (tuple, list)) and output and all(isinstance(value, Tensor) for value in output):
        return tuple(output)
    kinds = {type(value) for value in (output if isinstance(output, (tuple, list)) else [output])}
    fix = (
        "make tensors of arrays with torch.from_numpy"
        if np.ndarray in kinds
        else "return a tensor or a tuple of tensors"
    )
    inside = " and ".join(sorted(kind.__name__ for kind in kinds)) if isinstance(output, (tuple, list)) else ""
    raise TypeError(f"{giver} returned {type(output).__name__}{f' with {inside}' if inside else ''}: {fix}")


def unwrap(values: Values) -> Tensor | Values:
    """Return a single tensor alone and several as a tuple, as arguments of a user's loss function."""
    return values[0] if len(values) == 1 else values


def sum_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which the gradients of a parameter are added up: of its ``grad`` between two backwards.

    It is at least fp32 if ``grad_dtype`` is None: the gradients of a backward may have any dtype then.
    """
    return parameter.grad_dtype or (torch.float32 if parameter.dtype.itemsize < 4 else parameter.dtype)


def cast_floating(values: Values, dtype: torch.dtype) -> Values:
    """Return tensors with those that are floating-point cast to a dtype."""
    return tuple([value.to(dtype) if value.is_floating_point() else value for value in values])


def in_fp32(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor in fp32, and any other tensor unchanged."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def bent(values: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(values / cap), which is never above the cap; without a cap the values unchanged."""
    return values if cap is None else (values / cap).tanh() * cap


def finite_logs(logs: Tensor) -> Tensor:
    """Return logarithms with 0 instead of -inf, so that -inf minus it is -inf and not NaN."""
    return logs.masked_fill(logs == -math.inf, 0.0)


Order = tuple[int, ...]  # dims, outermost in memory first


def memory_order(tensor: Tensor) -> Order:
    """Return the memory order of a tensor's dims.

    It is that of a new tensor if the elements do not fill a block of memory.
    """
    order = _by_stride(tensor)
    return order if tensor.permute(order).is_contiguous() else tuple(range(tensor.dim()))


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill a block of memory, in any order of dims."""
    return tensor.permute(_by_stride(tensor)).is_contiguous()


def empty_in(shape: tuple[int, ...], order: Order, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a tensor with this shape and memory order."""
    dims = [order.index(dim) for dim in range(len(order))]
    return torch.empty([shape[dim] for dim in order], dtype=dtype, device=device).permute(dims)


def host_like(tensor: Tensor) -> Tensor:
    """Allocate a dense tensor on the CPU like another one, in its memory order.

    For a meta tensor, ``torch.empty_like`` would import sympy.
    """
    return empty_in(tuple(tensor.shape), _by_stride(tensor), tensor.dtype, torch.device("cpu"))


def _by_stride(tensor: Tensor) -> Order:
    """Return the dims from the largest stride to the smallest."""
    return tuple(sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True))
