"""Which part of a dim is here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor  # a driver reads portions without torch


@dataclass(frozen=True)
class Portion:
    """Some of the equal pieces of a dim.

    of   pieces that all of the dim has
    own  the pieces that are here, in the order in which they stand here
    """

    of: int = 1
    own: tuple[int, ...] = (0,)

    @classmethod
    def at(cls, rank: int, size: int) -> Portion:
        """The one that a rank has where every rank has one."""
        return cls(size, (rank,))

    def then(self, inner: Portion) -> Portion:
        """Of what is here the part ``inner``; in pieces no finer than that takes, which the dim's length must allow."""
        finer = inner.of // math.gcd(inner.of, len(self.own))  # so many of each piece
        pieces = [piece * finer + i for piece in self.own for i in range(finer)]
        size = len(pieces) // inner.of
        return Portion(self.of * finer, tuple(pieces[part * size + i] for part in inner.own for i in range(size)))

    def whole(self, length: int) -> int:
        """The length of all of the dim, from that of what is here."""
        return length * self.of // len(self.own)

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """What is here of a tensor: a copy, unless it stands in one place there."""
        if self.of == 1:
            return whole
        pieces = whole.unflatten(dim, (self.of, -1))
        first, last = self.own[0], self.own[-1]
        if self.own == tuple(range(first, last + 1)):
            here: Tensor = pieces.narrow(dim, first, len(self.own))
        else:
            here = pieces[(slice(None),) * dim + (list(self.own),)]
        return here.flatten(dim, dim + 1)
