"""Parameters of which each member of a tensor-parallel group updates a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from raypar.actors.cut import Cut
from raypar.actors.group import Group


class Divided:
    """What the members must agree on at the end of a step. Other parameters are replicated: the same on all of them.

    cuts     by logical name, of the parameters that are divided
    partial  the replicated parameters whose gradients are a part on every member, to be summed
    group    None: nothing is divided
    """

    def __init__(self, cuts: Mapping[str, Cut], partial: Set[str], group: Group | None) -> None:
        self._cuts, self._group, self._partial = cuts, group, partial

    def complete(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum partial gradients over the members, all in one message."""
        made = [p.grad for name, p in parameters.items() if name in self._partial and p.grad is not None]
        if self._group is not None and made:
            flat = torch.cat([gradient.flatten() for gradient in made])
            self._group.all_reduce(flat).wait()
            for gradient, total in zip(made, flat.split([gradient.numel() for gradient in made]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def norms(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """The norms of logical gradients (n,) from those of what is here, on the host; the same on every member."""
        if self._group is None:
            return norms
        divided = torch.tensor([name in self._cuts for name in names])
        squares = torch.where(divided, norms.double().square(), 0.0)
        self._group.host.all_reduce(squares).wait()
        return torch.where(divided, squares.sqrt().to(norms.dtype), norms)
