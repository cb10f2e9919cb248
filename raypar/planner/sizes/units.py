"""The units of a stage: the parameters that are gathered together, where weights are sharded over replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import pairwise

from raypar.actors.models.tiles.tile_names import tile_count
from raypar.planner.sizes.tensors import Stage, Weight, held_count

_LARGEST = 16  # tensors of a stage whose sizes are kept


@dataclass(frozen=True)
class Units:
    """The parameters of a stage that are gathered together, where weights are sharded over replicas.

    Attributes:
        whole: Parameters of all units together. A weight that two units share counts once.
        two: The most parameters that are whole at a time: those that a layer or a tile needs, and the next one, whose
            units are gathered meanwhile.
        largest: Sizes of the largest tensors, in falling order; of many only the first ones.
        tensors: Number of all tensors. A reduction sends a flag with the gradient of each.
        count: Number of units: what is gathered at once, and by itself.
        experts: Parameters of experts among ``whole``, if experts are divided over actors.
        expert_tensors: Number of their tensors.
        staying: Those of ``whole`` that nobody gathers, as no other actor holds them. They are not in ``two``.
    """

    whole: int
    two: int
    largest: Sequence[int]
    tensors: int
    count: int
    experts: int = 0
    expert_tensors: int = 0
    staying: int = 0

    @property
    def gathered(self) -> int:
        """Parameters of all units that are gathered."""
        return self.whole - self.staying

    @classmethod
    def of(cls, units: Stage, patterns: Mapping[str, int], *, experts_stay: bool = False) -> Units:
        """Return the units of a stage.

        Args:
            units: The tensors of the layers of each unit, in turn.
            patterns: Into how many tiles linear layers are cut, by pattern of their names.
            experts_stay: Whether experts stay whole on their actor, so that nobody gathers them.
        """
        cut = _cut(units, patterns) if any(count > 1 for count in patterns.values()) else {}
        every, groups = dict[str, Weight](), list[_Group]()
        for unit in units:
            own = {weight.name: weight for layer in unit for weight in layer}
            tiles = [_tiles(layer, cut) for layer in unit]
            gathered = held_count(weight for weight in own.values() if not (experts_stay and weight.is_expert))
            groups.append((gathered - sum(map(sum, tiles)), tiles))
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
            tensors=sum(weight.copies * cut.get(weight.layer, 1) for weight in every.values()),
            count=max(1, sum((rest > 0) + sum(map(len, layers)) for rest, layers in groups)),
            experts=held_count(experts),
            expert_tensors=sum(weight.copies for weight in experts),
            staying=held_count(experts) if experts_stay else 0,
        )


_Group = tuple[int, Sequence[Sequence[int]]]  # parameters without tiles; of each layer, those of each tile


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
