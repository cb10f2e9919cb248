"""Parameters of which each member of a tensor-parallel group updates a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raypar.actors.cut import Cut
from raypar.actors.group import Group


class Divided:
    """What the members must agree on at the end of a step. The others' parameters have the same bits on all of them.

    cuts   by logical name, of the parameters that are divided
    group  None: nothing is
    """

    def __init__(self, cuts: Mapping[str, Cut], group: Group | None) -> None:
        self._cuts, self._group = cuts, group

    def norms(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """The norms of logical gradients (n,) from those of what is here, on the host; the same on every member."""
        if self._group is None:
            return norms
        divided = torch.tensor([name in self._cuts for name in names])
        squares = torch.where(divided, norms.double().square(), 0.0)
        self._group.host.all_reduce(squares).wait()
        return torch.where(divided, squares.sqrt().to(norms.dtype), norms)
