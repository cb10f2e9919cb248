"""What an actor holds of a logical tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor  # a driver reads cuts without torch

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
