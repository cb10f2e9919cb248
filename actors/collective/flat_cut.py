"""How a flat tensor is cut into the parts of a group's members, each of several spans."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from raypar.actors.autograd.torch_private import copy_each
from raypar.actors.sharding import Span


@dataclass(frozen=True)
class FlatCut:
    """Where each member's part of a flat tensor lies. It is the same on every member.

    A part packed is the spans of a member one after the other. What lies in no span belongs to nobody.

    Attributes:
        spans: By rank, the spans of its part. Those of one rank ascend, and no two spans have an element in common.
    """

    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The elements of each rank's part."""
        return tuple(sum(stop - start for start, stop in spans) for spans in self.spans)

    @cached_property
    def end(self) -> int:
        """The least number of elements of a flat tensor that has all spans."""
        return max((stop for spans in self.spans for _, stop in spans), default=0)

    def views(self, flat: Tensor, rank: int, start: int = 0, stop: int | None = None) -> list[Tensor]:
        """Return the views of a flat tensor that make up a part, or a range of it.

        Args:
            flat: The flat tensor.
            rank: Whose part.
            start: First element of the range, counted in the packed part.
            stop: The element after its last; the range ends with the part at the latest. None for all.
        """
        ends, found = self._ends[rank], list[Tensor]()
        stop = self.counts[rank] if stop is None else min(stop, self.counts[rank])
        number = bisect_right(ends, start)
        while start < stop:
            first = self.spans[rank][number][1] - (ends[number] - start)
            count = min(ends[number], stop) - start
            if count:
                found.append(flat[first : first + count])
            start, number = start + count, number + 1
        return found

    def part(self, flat: Tensor, rank: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a part, or a range of it as in ``views``, packed: a view if it is one, else a copy."""
        found = self.views(flat, rank, start, stop)
        return found[0] if len(found) == 1 else torch.cat([*found, flat[:0]])

    def put(self, flat: Tensor, rank: int, part: Tensor, start: int = 0) -> None:
        """Copy a part, or a range of it that begins at ``start``, into the flat tensor.

        Args:
            flat: The flat tensor.
            rank: Whose part.
            part: The range, packed.
            start: Its first element, counted in the packed part.
        """
        views = self.views(flat, rank, start, start + part.numel())
        copy_each(views, list(part.split([view.numel() for view in views])))

    def take(self, flat: Tensor, others: Mapping[int, Tensor]) -> None:
        """Copy the parts of other ranks from their flat tensors.

        Args:
            flat: The flat tensor into which they are copied.
            others: The flat tensor of each of the other ranks.
        """
        targets = [view for rank in others for view in self.views(flat, rank)]
        copy_each(targets, [view for rank, other in others.items() for view in self.views(other, rank)])

    def packed(self, flat: Tensor) -> Tensor:
        """Return a copy (sum of the counts,) of all parts, packed, in rank order."""
        return torch.cat([*(view for rank in range(len(self.spans)) for view in self.views(flat, rank)), flat[:0]])

    def unpack(self, packed: Tensor, flat: Tensor) -> None:
        """Copy all parts into the flat tensor: the inverse of ``packed``."""
        for rank, part in enumerate(packed.split(list(self.counts))):
            self.put(flat, rank, part)

    @cached_property
    def _ends(self) -> list[list[int]]:
        """Where each span of a rank ends in its packed part."""
        return [list(accumulate(stop - start for start, stop in spans)) for spans in self.spans]
