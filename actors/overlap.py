"""Weights that share their memory with other tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

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
    fixed = defaultdict[int, list[str]](list)  # by storage
    for name, parameter in part.parameters.items():
        if there[_storage(parameter)] > 1:
            fixed[_storage(parameter)].append(name)
    for names in fixed.values():
        if len({part.owner_of[name] for name in names}) > 1:
            _demand_apart(part, names)
    return {name for names in fixed.values() for name in names}


def _demand_apart(part: Part, names: Sequence[str]) -> None:
    """Raise ValueError if weights of one storage with different owners have elements in common."""
    storage = part.parameters[names[0]].untyped_storage()
    marks = torch.zeros(storage.nbytes(), dtype=torch.int32)  # for each byte: whose it is, counted from 1
    for index, name in enumerate(names, 1):
        own = _bytes_of(part.parameters[name], marks)
        for other in (names[mark - 1] for mark in own.unique().tolist() if mark):
            if part.owner_of[other] != part.owner_of[name]:
                raise ValueError(
                    f"{other} and {name} overlap in memory, and with replicas each is updated by another one: "
                    "clone one of them, or set zero to 0"
                )
        own.fill_(index)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(tensor: Tensor, numbers: Tensor) -> Tensor:
    """Those of the numbers that belong to the bytes of the tensor."""
    size = tensor.element_size()
    strides = [size * stride for stride in tensor.stride()]
    return numbers.as_strided((*tensor.shape, size), (*strides, 1), size * tensor.storage_offset())
