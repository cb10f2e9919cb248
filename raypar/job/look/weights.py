"""The weights of a replica as a mapping, whose tensors are fetched from the actors, and joined if they are tiles."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import TYPE_CHECKING, Any, TypeVar

from raypar.actors.models.tiles.tile_names import tile_of, untiled
from raypar.actors.sharding import Pieces, Shard, Sharding

if TYPE_CHECKING:
    from torch import Tensor

Pairs = Iterator[tuple[str, "Tensor"]]
Shape = tuple[int, ...]
T = TypeVar("T", bound="Tensor | None")


class Weights(Mapping[str, "Tensor"]):
    """All weights of one replica by logical name, each whole and on the CPU.

    Nothing is cached: every access fetches the present weights. ``items()`` and ``values()`` call each pipeline rank
    once and hold the weights of one rank at a time.

    Args:
        shapes: The shapes by logical name, without the copies of tied weights.
        fetch: Fetches one weight by name.
        fetch_all: Fetches all weights, rank by rank. If the two ends of a tied weight are on different ranks, both have
            the name of the first copy.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], fetch: Callable[[str], Tensor], fetch_all: Callable[[], Pairs]
    ) -> None:
        self._shapes, self._fetch, self._fetch_all = shapes, fetch, fetch_all

    def __getitem__(self, name: str) -> Tensor:
        """Fetch one weight. Raises KeyError if there is no such weight."""
        return self._fetch(name)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __repr__(self) -> str:
        return "\n".join([f"<{len(self)} weights>", *(f"{name} {shape}" for name, shape in self._shapes.items())])

    def items(self) -> ItemsView[str, Tensor]:
        """Return names and weights, which are fetched rank by rank."""
        return _Items(self)

    def values(self) -> ValuesView[Tensor]:
        """Return the weights, which are fetched rank by rank."""
        return _Values(self)

    def ends(self) -> Pairs:
        """Fetch all weights, rank by rank: as ``items``, but both ends of a tied weight that is on two ranks."""
        return self._fetch_all()

    def once(self) -> Pairs:
        """Fetch all weights, rank by rank, each name once."""
        seen = set[str]()
        for name, weight in self._fetch_all():
            if name not in seen:
                seen.add(name)
                yield name, weight


class _Items(ItemsView[str, "Tensor"]):
    _mapping: Weights

    def __iter__(self) -> Pairs:
        return self._mapping.once()


class _Values(ValuesView["Tensor"]):
    _mapping: Weights

    def __iter__(self) -> Iterator[Tensor]:
        return (weight for _, weight in self._mapping.once())


def joined(pairs: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Join the tiles among named tensors; the whole comes when its last tile does.

    Args:
        pairs: Names and tensors; None for a missing gradient.
    """
    import torch

    found: dict[str, dict[int, T]] = {}
    for name, tensor in pairs:
        if (tile := tile_of(name)) is None:
            yield name, tensor
            continue
        parts = found.setdefault(untiled(name), {})
        parts[tile.own[0]] = tensor
        if len(parts) == tile.count:
            ordered = [part for _, part in sorted(found.pop(untiled(name)).items())]
            present: list[Any] = [part for part in ordered if part is not None]
            whole: Any = torch.cat(present) if len(present) == tile.count else None
            yield untiled(name), whole


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
