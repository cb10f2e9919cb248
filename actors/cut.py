"""What an actor holds of a logical tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """All of a logical tensor, or spans of it along one dim, one after the other.

    whole  the logical tensor's shape
    spans  first and one behind the last index of each; none means all of it
    """

    whole: tuple[int, ...]
    dim: int = 0
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is held."""
        if not self.spans:
            return self.whole
        return (*self.whole[: self.dim], sum(self._sizes), *self.whole[self.dim + 1 :])

    def take(self, whole: Tensor) -> Tensor:
        """What is held of the logical tensor, in memory of its own if that is not all of it."""
        if not self.spans:
            return whole
        held = whole.new_empty(self.shape)
        for offset, piece in self.pieces(held):
            piece.copy_(whole.narrow(self.dim, offset[self.dim], piece.shape[self.dim]))
        return held

    def put(self, whole: Tensor, held: Tensor) -> None:
        """Write what is held, if that is not all of it, into the logical tensor."""
        for offset, piece in self.pieces(held):
            whole.narrow(self.dim, offset[self.dim], piece.shape[self.dim]).copy_(piece)

    def pieces(self, held: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """What is held as blocks of the logical tensor, each with its offset there."""
        if not self.spans:
            yield (0,) * len(self.whole), held
            return
        for (start, _), piece in zip(self.spans, held.split(self._sizes, self.dim), strict=True):
            yield tuple(start if dim == self.dim else 0 for dim in range(len(self.whole))), piece

    @property
    def _sizes(self) -> list[int]:
        return [stop - start for start, stop in self.spans]


def joined(cuts: Sequence[Cut], held: Sequence[Tensor]) -> Tensor:
    """The logical tensor that several actors hold; the first one's where each holds all of it."""
    if not cuts[0].spans:
        return held[0]
    whole = held[0].new_empty(cuts[0].whole)
    for cut, part in zip(cuts, held, strict=True):
        cut.put(whole, part)
    return whole
