"""Compute in float64 what is written for float32: new tensors are in float64, and random values are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from raypar.actors.autograd.torch_private import DispatchMode, map_leaves, written_arguments


@contextmanager
def in_float64() -> Iterator[None]:
    """Make float64 the default dtype in the block, and let what is drawn at random be what float32 draws."""
    with _default(torch.float64), _SameDraws():
        yield


class _SameDraws(DispatchMode):
    """Draws float64 values as float32, which takes other bits of the generator, and widens them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        with _default(torch.float32):
            drawn = func(*map_leaves(_narrow, args), **map_leaves(_narrow, kwargs))
        if written_arguments(func) and args and isinstance(args[0], Tensor):
            return args[0].copy_(drawn)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        wanted = [tensor.dtype for tensor in tensors] or [kwargs.get("dtype") or torch.float64]
        return map_leaves(_wide, drawn) if torch.float64 in wanted else drawn


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """Make a dtype that of new tensors in the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _narrow(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.float64:
        return value.float()
    return torch.float32 if value is torch.float64 else value


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.dtype == torch.float32 else value
