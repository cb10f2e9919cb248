"""Dropout of a divided tensor: the mask is a part of the one that the whole tensor would have."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.group import Group


class DividedDropout(nn.Module):
    """Dropout of a tensor that is divided along ``dim``."""

    def __init__(self, p: float, group: Group, dim: int) -> None:
        super().__init__()
        self.p, self._group, self._dim = p, group, dim

    def forward(self, x: Tensor) -> Tensor:
        return part_of_dropout(x, self.p, self._group, self._dim) if self.p and self.training else x


def part_of_dropout(x: Tensor, p: float, group: Group, dim: int) -> Tensor:
    """Dropout of this member's part along ``dim``; every member draws the whole mask, from equal generators, so that
    they stay equal."""
    size = x.shape[dim]
    whole = x.new_ones([size * group.size if at == dim else length for at, length in enumerate(x.shape)])
    return x * F.dropout(whole, p).narrow(dim, group.rank * size, size)
