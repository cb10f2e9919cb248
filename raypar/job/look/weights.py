"""The weights of a replica as a mapping, whose tensors are fetched from the actors at each access."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Pairs = Iterator[tuple[str, "Tensor"]]


class Weights(Mapping[str, "Tensor"]):
    """All weights of one replica by logical name, each whole and on the CPU.

    Nothing is cached: every access fetches the present weights. ``items()`` and ``values()`` call each pipeline rank once and
    hold the weights of one rank at a time.

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
