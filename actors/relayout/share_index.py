"""An index of the parts of tensors that the shares of a state have, by which an actor finds the shares that it needs.

Imports no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from raypar.actors.checkpoint.logical import AnyStored, Logical, Stored
from raypar.actors.checkpoint.snapshot_address import SnapshotOwner
from raypar.actors.relayout.moves import Boxes, BoxFinder
from raypar.actors.sharding import Box, Shape, box_at


class StoredBoxes(NamedTuple):
    """The parts of a logical tensor in a share.

    Attributes:
        whole: Shape of the logical tensor.
        boxes: The parts.
    """

    whole: Shape
    boxes: tuple[Box, ...]


ShareContents = Mapping[str, StoredBoxes]
"""the parts in a share, by logical name"""


def contents_of(tensors: Mapping[str, Logical]) -> ShareContents:
    """Return the contents of a share, from the logical tensors that are stored in its files."""
    return {
        name: StoredBoxes(logical.shape, tuple(box for one in logical.slices for box in _boxes_of(one)))
        for name, logical in tensors.items()
    }


def _boxes_of(stored: AnyStored) -> Iterator[Box]:
    """Yield the boxes of a slice that are in known files."""
    if isinstance(stored, Stored) or not stored.elements:
        yield box_at(stored.offset, stored.shape)
        return
    for rank in stored.files:
        if (span := stored.span(rank)) is not None:
            yield from stored.part(span).boxes()


class ShareIndex:
    """Finds the shares that have parts of tensors. The driver creates it once, and each actor looks up its parts.

    Args:
        contents: The contents of each share of a layout.

    Attributes:
        shapes: Shapes of all logical tensors by name.
    """

    def __init__(self, contents: Mapping[SnapshotOwner, ShareContents]) -> None:
        ranks: dict[str, array[int]] = {}
        self.shapes, boxes = dict[str, Shape](), dict[str, list[Box]]()
        (self._layout,) = {share.layout for share in contents}
        for share, tensors in contents.items():
            for name, stored in tensors.items():
                self.shapes[name] = stored.whole
                boxes.setdefault(name, []).extend(stored.boxes)
                ranks.setdefault(name, array("i")).extend([share.rank] * len(stored.boxes))
        self._finders, self._ranks = {name: BoxFinder(its) for name, its in boxes.items()}, ranks

    def needed(self, wanted: Boxes) -> list[SnapshotOwner]:
        """Return the shares that have elements of some parts of tensors, in the order of their ranks.

        Args:
            wanted: The parts, of existing tensors.
        """
        found = set[int]()
        for name, boxes in wanted.items():
            finder, ranks = self._finders[name], self._ranks[name]
            having = {ranks[number] for box in boxes for number in finder.common(box)}
            found |= having or {ranks[0]}  # for a part without elements, any share of the tensor
        return [SnapshotOwner(self._layout, rank) for rank in sorted(found)]
