"""Buckets: gradients (and weights) of several parameters as one flat tensor, so that they travel together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

import torch
from torch import Tensor, nn

from raypar.actors.tensors import nbytes


class Bucket:
    """Parameters of one stage, of one dtype, whose gradients travel in one flat tensor.

    Behind the gradients that tensor has a place for each parameter, 1 if there is a gradient. Summed over the replicas
    it tells a parameter that nobody used, whose gradient stays None as in one process, from a gradient of zeros.

    stage       the number of the stage
    owner       where the gradients go: the index of a channel of the Reducer
    parameters  by logical name, in the order of the flat tensor
    elements    of all weights
    """

    def __init__(self, stage: int, owner: int, parameters: Mapping[str, nn.Parameter]) -> None:
        self.stage, self.owner, self.parameters = stage, owner, dict(parameters)
        members = list(self.parameters.values())
        *starts, self.elements = accumulate((p.numel() for p in members), initial=0)
        strides = [torch.empty_like(p).stride() for p in members]  # dense, whatever p's own are
        self._where = dict(zip(self.parameters, zip(starts, strides, strict=True), strict=True))
        self._like: Tensor = members[0]

    @property
    def size(self) -> int:
        """Elements of the flat tensor."""
        return self.elements + len(self.parameters)

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    @torch.no_grad()
    def move_in(self, name: str, flat: Tensor) -> None:
        """Make a parameter's gradient a view of the flat tensor; what it was is given back."""
        parameter, place = self.parameters[name], self._place(name, flat)
        if parameter.grad is not None and parameter.grad.data_ptr() != place.data_ptr():
            parameter.grad = place.copy_(parameter.grad)

    def places(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter and its gradient's part of the flat tensor."""
        return ((parameter, self._place(name, flat)) for name, parameter in self.parameters.items())

    @torch.no_grad()
    def fill(self, flat: Tensor) -> None:
        """Complete the flat tensor: all gradients are in it, and where there is none there are zeros."""
        made = torch.tensor([float(p.grad is not None) for p in self.parameters.values()])
        flat[self.elements :].copy_(made, non_blocking=True)  # a GPU is in the middle of a backward
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                parameter.grad = self._place(name, flat).zero_()
            else:
                self.move_in(name, flat)

    def zeros(self) -> Tensor:
        """A flat tensor without any gradient."""
        return self._like.new_zeros(self.size)

    def adopt(self, flat: Tensor) -> None:
        """Make the gradients views of a flat tensor that was summed up; None for a parameter that nobody used."""
        used = flat[self.elements :].tolist()
        for (name, parameter), uses in zip(self.parameters.items(), used, strict=True):
            parameter.grad = self._place(name, flat) if uses else None

    def room(self) -> Tensor:
        """A flat tensor for the weights."""
        return self._like.new_empty(self.elements)

    @torch.no_grad()
    def weights(self) -> Tensor:
        """A new flat tensor with the weights."""
        flat = self.room()
        for name, parameter in self.parameters.items():
            self._place(name, flat).copy_(parameter)
        return flat

    @torch.no_grad()
    def settle(self, flat: Tensor) -> None:
        """Let the weights live in a flat tensor (elements,) from now on."""
        for name, parameter in self.parameters.items():
            parameter.data = self._place(name, flat).copy_(parameter)

    def disown(self) -> None:
        """Forget the gradients: their sum is elsewhere."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def load(self, flat: Tensor) -> None:
        """Take the weights from a flat tensor."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self._place(name, flat))

    def _place(self, name: str, flat: Tensor) -> Tensor:
        """A parameter's part of a flat tensor, with the strides that a gradient of it has: optimizers rely on it."""
        start, stride = self._where[name]
        return flat.as_strided(self.parameters[name].shape, stride, start)


def pack(stage: int, parameters: Mapping[str, nn.Parameter], owner_of: Mapping[str, int], limit: int) -> list[Bucket]:
    """The buckets of a stage, of at most ``limit`` bytes of gradients each; a larger tensor is a bucket by itself.

    parameters  of the stage by logical name, in the order of use: backwards make their gradients from last to first
    owner_of    the channel of each parameter; no bucket has two, and what is in those of one does not depend on others
    """
    done: list[Bucket] = []
    filling: dict[tuple[int, torch.dtype], dict[str, nn.Parameter]] = {}
    for name in reversed(list(parameters)):
        parameter = parameters[name]
        key = owner_of[name], parameter.dtype
        held = filling.get(key, {})
        if held and sum(map(nbytes, held.values())) + nbytes(parameter) > limit:
            done.append(Bucket(stage, key[0], filling.pop(key)))
        filling.setdefault(key, {})[name] = parameter
    return done + [Bucket(stage, owner, held) for (owner, _), held in filling.items()]


def share_out(sizes: Mapping[str, int], owners: int) -> dict[str, int]:
    """The owner of each parameter: whole tensors, the largest first, each to whoever has the fewest bytes so far."""
    loads = [0] * owners
    owner_of = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner = loads.index(min(loads))
        loads[owner] += sizes[name]
        owner_of[name] = owner
    return owner_of
