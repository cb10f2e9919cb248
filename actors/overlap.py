"""Weights that share their memory with other tensors."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from raypar.actors.deferred import slots_of
from raypar.actors.part import Part


def fixed_weights(part: Part) -> set[str]:
    """The weights that share their memory with other tensors of the layers, which are not to lose sight of them.

    Raises ValueError if two of them have elements in common, and are updated by different replicas.
    """
    modules = [one for stage in part.stages.values() for module in stage.modules for one in module.modules()]
    tensors = {id(tensor): tensor for module in modules for *_, tensor in slots_of(module)}
    there = Counter(map(_storage, tensors.values()))
    fixed = {name: p for name, p in part.parameters.items() if there[_storage(p)] > 1}
    names, seen = ["", *fixed], dict[int, Tensor]()
    for index, (name, parameter) in enumerate(fixed.items(), 1):
        marks = seen.setdefault(_storage(parameter), _unmarked(parameter))
        own = _bytes_of(parameter, marks)
        for other in (names[mark] for mark in own.unique().tolist() if mark):
            if part.owner_of[other] != part.owner_of[name]:
                raise ValueError(
                    f"{other} and {name} overlap in memory, and with replicas each is updated by another one: "
                    "clone one of them, or set zero to 0"
                )
        own.fill_(index)
    return set(fixed)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _unmarked(tensor: Tensor) -> Tensor:
    """A number for each byte of the memory that a tensor is part of."""
    return torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.int32)


def _bytes_of(tensor: Tensor, numbers: Tensor) -> Tensor:
    """Those of the numbers that belong to the bytes of the tensor."""
    size = tensor.element_size()
    strides = [size * stride for stride in tensor.stride()]
    return numbers.as_strided((*tensor.shape, size), (*strides, 1), size * tensor.storage_offset())
