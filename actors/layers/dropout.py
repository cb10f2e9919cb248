"""Dropout of a divided tensor: the mask is a part of the one that the whole tensor would have."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.group import Group


class DividedDropout(nn.Dropout):
    """Dropout of a tensor of which each member has an equal part along ``dim``.

    Every member draws the whole mask, from equal generators, so that they stay equal.
    """

    def __init__(self, p: float, group: Group, dim: int) -> None:
        super().__init__(p)
        self._group, self._dim = group, dim

    def forward(self, x: Tensor) -> Tensor:
        if not self.p or not self.training:
            return x
        size, ranks = x.shape[self._dim], self._group.size
        whole = x.new_ones([size * ranks if dim == self._dim else length for dim, length in enumerate(x.shape)])
        mask = F.dropout(whole, self.p).narrow(self._dim, self._group.rank * size, size)
        return x * mask.clone()  # the backward keeps it, and with a view all of it
