"""Grids of tensor-parallel ranks: their spelling, and each rank's position."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, NamedTuple

from annotated_types import Predicate

GridKind = Literal["2d", "2.5d", "3d"]
_SIDE = "[1-9][0-9]{0,2}"


class GridLine(NamedTuple):
    """The ranks of a grid that differ along one axis only.

    Attributes:
        axis: The axis.
        members: The ranks, in the order of their position on the axis.
    """

    axis: str
    members: tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """A grid of tensor-parallel ranks: a square (2d), stacked squares (2.5d) or a cube (3d).

    Attributes:
        kind: "2d", "2.5d" or "3d".
        side: Ranks along each axis of a square or cube.
        depth: Number of squares of a 2.5d grid.

    Source: 2d: Optimus (Xu & You 2021). 2.5d: Tesseract (Wang et al. 2021). 3d: Bian et al. 2021.
    """

    kind: GridKind
    side: int
    depth: int = 1

    @property
    def axes(self) -> Mapping[str, int]:
        """Number of ranks along each axis, innermost last.

        Ranks along ``col`` form a column: they differ in their row.
        """
        if self.kind == "3d":
            return {"x": self.side, "y": self.side, "z": self.side}
        square = {"col": self.side, "row": self.side}
        return square if self.kind == "2d" else {"depth": self.depth, **square}

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.depth * self.side ** (3 if self.kind == "3d" else 2)

    @property
    def batch_parts(self) -> int:
        """Number of parts into which each microbatch is divided."""
        return self.side**2 if self.kind == "3d" else self.side * self.depth

    def lines(self, rank: int) -> Iterator[GridLine]:
        """Yield the lines of more than one rank that contain ``rank``, which counts from 0 within the grid."""
        stride = self.size
        for axis, count in self.axes.items():
            stride //= count
            first = rank - rank // stride % count * stride
            if count > 1:
                yield GridLine(axis, tuple(range(first, first + count * stride, stride)))


@cache
def grid_of(spelling: str) -> Grid:
    """Parse a grid: ``2d:QxQ``, ``2.5d:QxQxD`` or ``3d:QxQxQ``, with Q of at least 2.

    Raises ValueError for any other spelling.
    """
    found = re.fullmatch(rf"(2d|2\.5d|3d):({_SIDE}(?:x{_SIDE}){{1,2}})", spelling)
    kind, sides = (found[1], [int(side) for side in found[2].split("x")]) if found is not None else ("", [1])
    match kind, sides:
        case "2d", [side, other] if side == other > 1:
            return Grid("2d", side)
        case "2.5d", [side, other, depth] if side == other > 1:
            return Grid("2.5d", side, depth)
        case "3d", [side, other, third] if side == other == third > 1:
            return Grid("3d", side)
    raise ValueError(f"{spelling!r} is no grid of tensor ranks")


def is_grid(spelling: str) -> bool:
    """Return whether a text spells a grid."""
    try:
        grid_of(spelling)
    except ValueError:
        return False
    return True


GridSpelling = Annotated[str, Predicate(is_grid)]
