"""Relative errors of tensors, and the norms that they are relative to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

NOISE = 1e-6  # a tensor with a smaller norm, relative to its layer's norm, is only rounding noise


def norm_of(tensor: Tensor) -> float:
    """Compute the 2-norm in fp64."""
    return float(torch.linalg.vector_norm(tensor.double()))


def relative_error(found: Tensor, wanted: Tensor, scale: float | None = None) -> float:
    """Compute the norm of the difference of two tensors, relative to a scale.

    Args:
        found: The tensor to judge.
        wanted: The right tensor.
        scale: The norm by which the error is divided, or None for that of ``wanted``. A scale of 0 is replaced by 1.

    Returns:
        The relative error; infinite if the shapes differ.
    """
    if found.shape != wanted.shape:
        return float("inf")
    return norm_of(found.double() - wanted.double()) / ((norm_of(wanted) if scale is None else scale) or 1.0)


def scales_of(tensors: Mapping[str, Tensor], layers: Iterable[str]) -> dict[str, float]:
    """Compute the norm by which the error of each tensor is divided.

    It is the tensor's norm, or the norm of its whole layer if the tensor's is below NOISE of that. Such a tensor is 0
    in exact arithmetic, like the gradient of the bias of attention keys.

    Args:
        tensors: Tensors by logical name; a name begins with that of its layer.
        layers: The logical names of the layers.

    Returns:
        The scale of each tensor, by logical name.
    """
    norms = {name: norm_of(tensor) for name, tensor in tensors.items()}
    order = sorted(layers, key=len, reverse=True)
    layer_of = {name: next((layer for layer in order if f"{name}.".startswith(f"{layer}.")), "") for name in norms}
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        squares[layer_of[name]] = squares.get(layer_of[name], 0.0) + norm**2
    wholes = {layer: square**0.5 for layer, square in squares.items()}
    whole = {name: wholes[layer] for name, layer in layer_of.items()}
    return {name: whole[name] if norm < NOISE * whole[name] else norm for name, norm in norms.items()}


def are_alike(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> bool:
    """Return whether tensors, taken together, are equal within a tolerance.

    Args:
        found: The tensors to judge.
        wanted: The right tensors, as many.
        tolerance: The largest norm of the difference, relative to the norm of ``wanted``.

    Returns:
        Whether they are; False if a pair has different shapes.
    """
    pairs = list(zip(found, wanted, strict=True))
    if any(one.shape != other.shape for one, other in pairs):
        return False
    difference = math.hypot(*(norm_of(one.double() - other.double()) for one, other in pairs))
    return difference <= tolerance * math.hypot(*map(norm_of, wanted))
