"""Parameters of which each member of a tensor-parallel group updates a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from raypar.actors.cut import Cut
from raypar.actors.group import Group

Groups = tuple[Group, ...]


class Divided:
    """What the members must agree on at the end of a step. Other parameters are replicated: the same on all of them.

    cuts     by logical name, of the parameters that are divided
    partial  over which groups the gradients of a parameter, the same part of which all their members have, are to be
             summed
    group    None: nothing is divided
    """

    def __init__(self, cuts: Mapping[str, Cut], partial: Mapping[str, Groups], group: Group | None) -> None:
        self._cuts, self._group, self._partial = cuts, group, partial
        self._counted = {name for name in cuts if first_of(partial.get(name, ()))}

    def complete(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum partial gradients over the members, all that a group has to sum in one message."""
        made = {name: p.grad for name, p in parameters.items() if name in self._partial and p.grad is not None}
        for group in dict.fromkeys(group for name in made for group in self._partial[name]):
            _sum([gradient for name, gradient in made.items() if group in self._partial[name]], group)

    def norms(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """The norms of logical gradients (n,) from those of what is here, on the host; the same on every member."""
        if self._group is None:
            return norms
        divided = torch.tensor([name in self._cuts for name in names])
        counted = torch.tensor([name in self._counted for name in names])
        squares = torch.where(counted, norms.double().square(), 0.0)
        self._group.host.all_reduce(squares).wait()
        return torch.where(divided, squares.sqrt().to(norms.dtype), norms)


def first_of(groups: Groups) -> bool:
    """Whether this member is the first of all that have the same as their fellow members of these groups."""
    return all(group.rank == 0 for group in groups)


def _sum(gradients: Sequence[Tensor], group: Group) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    group.all_reduce(flat).wait()
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
