"""By how much tensors differ, relative to what."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

NOISE = 1e-6  # of its layer's norm: what is less comes of rounding only


def norm_of(tensor: Tensor) -> float:
    """2-norm, in fp64."""
    return float(torch.linalg.vector_norm(tensor.double()))


def relative_error(found: Tensor, wanted: Tensor, scale: float | None = None) -> float:
    """Norm of the difference over ``scale``: without one over the norm of ``wanted`` (over 1 if that is 0)."""
    if found.shape != wanted.shape:
        return float("inf")
    return norm_of(found.double() - wanted.double()) / ((norm_of(wanted) if scale is None else scale) or 1.0)


def scales_of(tensors: Mapping[str, Tensor], layers: Iterable[str]) -> dict[str, float]:
    """What the error of each tensor is relative to: its own norm, or that of its whole layer where its own is nothing
    beside that. Such a tensor is 0 in exact arithmetic, as the gradient of a bias of keys is.

    tensors  by logical names, that begin with the name of a layer
    """
    norms = {name: norm_of(tensor) for name, tensor in tensors.items()}
    order = sorted(layers, key=len, reverse=True)
    homes = {name: next((layer for layer in order if f"{name}.".startswith(f"{layer}.")), "") for name in norms}
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        squares[homes[name]] = squares.get(homes[name], 0.0) + norm**2
    wholes = {layer: square**0.5 for layer, square in squares.items()}
    return {name: wholes[homes[name]] if norm < NOISE * wholes[homes[name]] else norm for name, norm in norms.items()}


def are_alike(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> bool:
    """Whether tensors, taken together, differ by so much of the norm of ``wanted`` at most; unequal shapes are not."""
    pairs = list(zip(found, wanted, strict=True))
    if any(one.shape != other.shape for one, other in pairs):
        return False
    apart = math.hypot(*(norm_of(one.double() - other.double()) for one, other in pairs))
    return apart <= tolerance * math.hypot(*map(norm_of, wanted))
