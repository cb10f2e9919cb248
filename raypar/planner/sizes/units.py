"""The units of a stage: the parameters that are gathered together, where weights are sharded over replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import groupby, pairwise
from statistics import median_high
from typing import NamedTuple

from raypar.actors.models.tiles.tile_names import tile_count
from raypar.actors.sharding import num_blocks
from raypar.planner.sizes.tensors import Stage, Weight, held_count

_LARGEST = 16  # tensors of a stage whose sizes are kept


class TensorSize(NamedTuple):
    """How large a tensor is.

    Attributes:
        elements: Its elements on an actor.
        is_expert: Whether it is of an expert, of those that actors divide.
    """

    elements: int
    is_expert: bool


@dataclass(frozen=True)
class Units:
    """The parameters of a stage that are gathered together, where weights are sharded over replicas.

    Attributes:
        whole: Parameters of all units together. A weight that two units share counts once.
        two: The most parameters that are whole at a time: those that a layer or a tile needs, and the next one, whose
            units are gathered meanwhile.
        largest: Sizes of the largest tensors, in falling order; of many only the first ones.
        sizes: Those of all tensors, in the order in which forwards use them.
        count: Number of units: what is gathered at once, and by itself.
        usual: Parameters of a unit that is neither large nor small among the others: the median, or the one above it.
        experts: Parameters of experts among ``whole``, if experts are divided over actors.
        staying: Those of ``whole`` that nobody gathers, as no other actor holds them. They are not in ``two``.
    """

    whole: int
    two: int
    largest: Sequence[int]
    sizes: Sequence[TensorSize]
    count: int
    usual: int
    experts: int = 0
    staying: int = 0

    @property
    def gathered(self) -> int:
        """Parameters of all units that are gathered."""
        return self.whole - self.staying

    def num_parts(self, ranks: int) -> int:
        """Count the parts of all tensors that are not experts', if so many ranks cut each.

        A rank has no part of a tensor that has fewer blocks than there are ranks.
        """
        return _num_parts(self.sizes, ranks, is_expert=False)

    def num_expert_parts(self, ranks: int) -> int:
        """Count the parts of experts' tensors in the same way."""
        return _num_parts(self.sizes, ranks, is_expert=True)

    @classmethod
    def of(cls, units: Stage, patterns: Mapping[str, int], *, experts_stay: bool = False) -> Units:
        """Return the units of a stage.

        Args:
            units: The tensors of the layers of each unit, in turn.
            patterns: Into how many tiles linear layers are cut, by pattern of their names.
            experts_stay: Whether experts stay whole on their actor, so that nobody gathers them.
        """
        cut = _cut(units, patterns) if any(count > 1 for count in patterns.values()) else {}
        every, groups, together = dict[str, Weight](), list[_Group](), list[int]()
        for unit in units:
            own = {weight.name: weight for layer in unit for weight in layer}
            tiles = [_tiles(layer, cut) for layer in unit]
            gathered = held_count(weight for weight in own.values() if not (experts_stay and weight.is_expert))
            groups.append((gathered - sum(map(sum, tiles)), tiles))
            together.append(held_count(own.values()))
            every |= own
        experts = [weight for weight in every.values() if weight.is_expert]
        sizes = [tile for _, layers in groups for tiles in layers for tile in tiles]
        for weight in every.values():
            sizes += [weight.held] * (weight.copies if weight.layer not in cut else 0)
        back = [(rest, [tiles[::-1] for tiles in layers[::-1]]) for rest, layers in groups[::-1]]
        return cls(
            whole=held_count(every.values()),
            two=max(_most_in_turn(groups), _most_in_turn(back)),
            largest=nlargest(_LARGEST, sizes),
            sizes=[*_sizes(every.values(), cut)],
            count=max(1, sum((rest > 0) + sum(map(len, layers)) for rest, layers in groups)),
            usual=median_high(together or [0]),
            experts=held_count(experts),
            staying=held_count(experts) if experts_stay else 0,
        )


_Group = tuple[int, Sequence[Sequence[int]]]  # parameters without tiles; of each layer, those of each tile


def _sizes(weights: Iterable[Weight], cut: Mapping[str, int]) -> Iterator[TensorSize]:
    """Yield the sizes of all tensors in order: all those of an expert, then those of the next one."""
    for copies, alike in groupby(weights, key=lambda weight: weight.copies):
        each = [(weight, cut.get(weight.layer, 1)) for weight in alike]
        one = [TensorSize(weight.held // tiles, weight.is_expert) for weight, tiles in each for _ in range(tiles)]
        yield from one * copies


def _num_parts(sizes: Iterable[TensorSize], ranks: int, *, is_expert: bool) -> int:
    return sum(min(ranks, num_blocks(one.elements)) for one in sizes if one.is_expert == is_expert)


def _cut(units: Stage, patterns: Mapping[str, int]) -> dict[str, int]:
    """Return into how many tiles linear layers are cut, by name."""
    linears = {one.layer for unit in units for layer in unit for one in layer if one.is_linear}
    return {name: count for name in linears if (count := tile_count(patterns, name)) > 1}


def _tiles(layer: Iterable[Weight], cut: Mapping[str, int]) -> list[int]:
    """Return the parameters of each tile of a layer: weights, and biases if there are some."""
    linears = Counter[str]()
    for weight in layer:
        linears[weight.layer] += weight.held
    return [held // cut[name] for name, held in linears.items() if name in cut for _ in range(cut[name])]


def _most_in_turn(groups: Sequence[_Group]) -> int:
    """Return the most parameters that two visits in turn need, of a pass over the groups."""
    visits = [
        (number, rest, tile)
        for number, (rest, layers) in enumerate(groups)
        for tiles in layers
        for tile in (0, *tiles)  # a layer is entered before its first tile
    ]
    pairs = pairwise([*visits, (len(groups), 0, 0)])
    return max(
        (
            one + cut + other + following - (one if at == then else 0)
            for (at, one, cut), (then, other, following) in pairs
        ),
        default=0,
    )
