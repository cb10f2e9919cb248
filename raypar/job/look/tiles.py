"""Join the tiles in which actors hold weights or their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, overload

from raypar.actors.models.tile_names import tile_of, untiled
from raypar.actors.sharding import Pieces, Shard, Sharding

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@overload
def joined(pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]: ...


@overload
def joined(pairs: Iterable[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor | None]]: ...


def joined(pairs: Iterable[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor | None]]:
    """Join the tiles among named tensors; the whole comes when its last tile does.

    Args:
        pairs: Names and tensors; None for a missing gradient.
    """
    import torch

    found: dict[str, dict[int, Tensor | None]] = {}
    for name, tensor in pairs:
        if (tile := tile_of(name)) is None:
            yield name, tensor
            continue
        parts = found.setdefault(untiled(name), {})
        parts[tile.own[0]] = tensor
        if len(parts) == tile.count:
            ordered = [part for _, part in sorted(found.pop(untiled(name)).items())]
            present = [part for part in ordered if part is not None]
            yield untiled(name), torch.cat(present) if len(present) == tile.count else None


def held_part(tiles: Sequence[tuple[str, Tensor]]) -> tuple[Shard, Tensor]:
    """Join the tiles of one logical tensor that an actor holds.

    Args:
        tiles: Their names, and the tiles, in their order; at least one.

    Returns:
        Which rows of the whole they are, and these rows.
    """
    import torch

    pieces = [tile for name, _ in tiles if (tile := tile_of(name)) is not None]
    count, first = pieces[0].count, tiles[0][1]
    own = Pieces(count, tuple(tile.own[0] for tile in pieces))
    return Shard((count * first.shape[0], *first.shape[1:]), Sharding({0: own})), torch.cat([one for _, one in tiles])


def whole_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of logical tensors by name, from those of the tensors and tiles that actors hold."""
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        tile = tile_of(name)
        found[untiled(name)] = shape if tile is None else (tile.count * shape[0], *shape[1:])
    return found


def tiles_of(name: str, held: Iterable[str]) -> list[str]:
    """Return the names of the tiles of a logical tensor, in order, among those that actors hold; [] if it is whole."""
    tiles = {one: tile.own[0] for one in held if (tile := tile_of(one)) is not None and untiled(one) == name}
    return sorted(tiles, key=tiles.__getitem__)
