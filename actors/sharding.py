"""What an actor holds of a logical tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


Span = tuple[int, int]  # the first index, and one behind the last


@dataclass(frozen=True)
class Cut:
    """All of a logical tensor, or its span along some dims.

    whole  the logical tensor's shape
    spans  by dim what is here; of other dims all is
    """

    whole: tuple[int, ...]
    spans: Mapping[int, Span] = field(default_factory=dict)

    @property
    def offset(self) -> tuple[int, ...]:
        """Where what is held begins in the logical tensor."""
        return tuple(self._span(dim)[0] for dim in range(len(self.whole)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is held."""
        return tuple(stop - start for start, stop in map(self._span, range(len(self.whole))))

    def take(self, whole: Tensor) -> Tensor:
        """What is held of the logical tensor: a view of it."""
        for dim, (start, stop) in self.spans.items():
            whole = whole.narrow(dim, start, stop - start)
        return whole

    def _span(self, dim: int) -> Span:
        return self.spans.get(dim, (0, self.whole[dim]))


def share_of(length: int, index: int, count: int) -> Span:
    """One of ``count`` shares of a dim; if they can't be equal, the first ones are larger by one."""
    base, extra = divmod(length, count)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


def joined(cuts: Sequence[Cut], held: Sequence[Tensor]) -> Tensor:
    """The logical tensor that several actors hold: parts of it each, or all of it each."""
    if not cuts[0].spans:
        return held[0]
    whole = held[0].new_empty(cuts[0].whole)
    for cut, part in zip(cuts, held, strict=True):
        cut.take(whole).copy_(part)
    return whole
