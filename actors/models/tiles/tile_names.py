"""Names of tiles, the pieces of a linear layer whose product is computed piece by piece. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from raypar.actors.sharding import Pieces
from raypar.actors.specs.model import GPT, Layers, Llama

_TILE = re.compile(r"\.tile(\d+)of(\d+)(?=\.)")


def tile_name(number: int, count: int) -> str:
    """Return the name of a tile in its linear layer."""
    return f"tile{number}of{count}"


def untiled(name: str) -> str:
    """Return the logical name of the whole weight or bias that a tile's name belongs to; any other name as it is."""
    return _TILE.sub("", name)


def tile_of(name: str) -> Pieces | None:
    """Return which rows of the whole a tile's weight or bias has, by its name; None for any other name."""
    found = _TILE.search(name)
    return None if found is None else Pieces.at(int(found[1]), int(found[2]))


def tile_patterns(model: GPT | Llama | Layers, tile: int | Mapping[str, int]) -> Mapping[str, int]:
    """Return into how many tiles linear layers are cut, by shell pattern of their logical names.

    Args:
        model: The model.
        tile: The run's setting. A number is for the MLPs and the head of a GPT or Llama, or for all linear layers of
            the user's own.
    """
    if not isinstance(tile, int):
        return tile
    return {"*": tile} if isinstance(model, Layers) else {"blocks.*.mlp.*": tile, "head.out": tile}


def tile_count(patterns: Mapping[str, int], name: str) -> int:
    """Return into how many tiles the linear layer of this name is cut. The first pattern that matches counts."""
    return next((count for pattern, count in patterns.items() if fnmatchcase(name, pattern)), 1)
