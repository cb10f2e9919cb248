"""What an actor holds of a logical tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor  # a driver reads cuts without torch


@dataclass(frozen=True)
class Cut:
    """All of a logical tensor, or its span along one dim.

    whole  the logical tensor's shape
    span   first and one behind the last index along ``dim``; None means all of it
    """

    whole: tuple[int, ...]
    dim: int = 0
    span: tuple[int, int] | None = None

    @property
    def offset(self) -> tuple[int, ...]:
        """Where what is held begins in the logical tensor."""
        start = self.span[0] if self.span else 0
        return tuple(start if dim == self.dim else 0 for dim in range(len(self.whole)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is held."""
        if self.span is None:
            return self.whole
        return (*self.whole[: self.dim], self.span[1] - self.span[0], *self.whole[self.dim + 1 :])

    def take(self, whole: Tensor) -> Tensor:
        """What is held of the logical tensor: a view of it."""
        return whole if self.span is None else whole.narrow(self.dim, self.span[0], self.span[1] - self.span[0])


def joined(cuts: Sequence[Cut], held: Sequence[Tensor]) -> Tensor:
    """The logical tensor that several actors hold: parts of it each, or all of it each."""
    if cuts[0].span is None:
        return held[0]
    whole = held[0].new_empty(cuts[0].whole)
    for cut, part in zip(cuts, held, strict=True):
        cut.take(whole).copy_(part)
    return whole
