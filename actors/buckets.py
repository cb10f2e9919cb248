"""Buckets: gradients (and weights) of several parameters as one flat tensor, so that they travel together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

import torch
from torch import Tensor, nn

from raypar.actors.group import nbytes


class Bucket:
    """Parameters of one stage, of one dtype, whose gradients travel in one flat tensor.

    Behind the gradients that tensor has a place for each parameter, 1 if there is a gradient. Summed over the replicas
    it tells a parameter that nobody used, whose gradient stays None as in one process, from a gradient of zeros.

    stage       the number of the stage
    owner       where the gradients go: the index of a channel of the Reducer
    parameters  by logical name, in the order of the flat tensor
    """

    def __init__(self, stage: int, owner: int, parameters: Mapping[str, nn.Parameter]) -> None:
        self.stage, self.owner, self.parameters = stage, owner, dict(parameters)
        members = list(self.parameters.values())
        *self._starts, self._end = accumulate((p.numel() for p in members), initial=0)
        self._strides = [torch.empty_like(p, device="meta").stride() for p in members]  # dense, whatever p's own are
        self._like: Tensor = members[0]

    @torch.no_grad()
    def gathered(self) -> Tensor:
        """A new flat tensor with the gradients. They become views of it, so that their own memory is given back."""
        flat = self._like.new_empty(self._end + len(self.parameters))
        flat[self._end :] = torch.tensor([float(p.grad is not None) for p in self.parameters.values()])
        for place, parameter in self._places(flat):
            if parameter.grad is None:
                place.zero_()
            else:
                place.copy_(parameter.grad)
            parameter.grad = place
        return flat

    def zeros(self) -> Tensor:
        """A flat tensor without any gradient."""
        return self._like.new_zeros(self._end + len(self.parameters))

    def adopt(self, flat: Tensor) -> None:
        """Make the gradients views of a flat tensor that was summed up; None for a parameter that nobody used."""
        used = flat[self._end :].tolist()
        for (place, parameter), uses in zip(self._places(flat), used, strict=True):
            parameter.grad = place if uses else None

    def room(self) -> Tensor:
        """A flat tensor for the weights."""
        return self._like.new_empty(self._end)

    @torch.no_grad()
    def weights(self) -> Tensor:
        """A new flat tensor with the weights."""
        flat = self.room()
        for place, parameter in self._places(flat):
            place.copy_(parameter)
        return flat

    @torch.no_grad()
    def load(self, flat: Tensor) -> None:
        """Take the weights from a flat tensor."""
        for place, parameter in self._places(flat):
            parameter.copy_(place)

    def _places(self, flat: Tensor) -> Iterator[tuple[Tensor, nn.Parameter]]:
        """Each parameter's part of a flat tensor, with the strides that a gradient of it has: optimizers rely on it."""
        for start, stride, parameter in zip(self._starts, self._strides, self.parameters.values(), strict=True):
            yield flat.as_strided(parameter.shape, stride, start), parameter


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
