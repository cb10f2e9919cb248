"""Parameters of which each member of a tensor-parallel group updates a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from raypar.actors.cut import Cut
from raypar.actors.group import Group


class Divided:
    """What the members must agree on at the end of a step. Other parameters are replicated: the same on all of them.

    cuts     by logical name, of the parameters that are divided
    group    None: nothing is
    partial  gradients of replicated parameters are partial, too; else they are the same on every member
    """

    def __init__(self, cuts: Mapping[str, Cut], group: Group | None, *, partial: bool) -> None:
        self._cuts, self._group, self._partial = cuts, group, partial

    def complete(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum partial gradients over the members, all in one message."""
        if self._group is None or not self._partial:
            return
        made = [p.grad for name, p in parameters.items() if name not in self._cuts and p.grad is not None]
        if made:
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
