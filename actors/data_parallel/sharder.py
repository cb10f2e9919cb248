"""Build the layers of an actor unit by unit, and move their weights into shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from torch import Tensor, nn

from raypar.actors.collective.group import Group
from raypar.actors.data_parallel.cut_layout import ReplicaCut
from raypar.actors.data_parallel.stage_weights import StageWeights
from raypar.actors.data_parallel.units import Unit
from raypar.actors.machine.high_water import HighWater
from raypar.actors.machine.offload_storage import OffloadStorage
from raypar.actors.models.base import Model
from raypar.actors.models.init.cast import cast
from raypar.actors.models.tiles.tile_names import tile_of
from raypar.actors.models.tiles.tiled import TiledLinear, tiled_in
from raypar.actors.optim.masters import master_of
from raypar.actors.sharding import Shard
from raypar.actors.specs.precision import Precision
from raypar.actors.tensors import dtype_of


@dataclass(eq=False)
class Sharder:
    """Builds the layers of an actor unit by unit and shards them, so that at most one unit is whole at a time.

    A unit is some consecutive layers of the model's body, or one other layer, such as an embedding or a head. A weight
    that several layers of the actor share is a unit by itself.

    Attributes:
        model: The model.
        make: Builds the layers with these indices, with their initial weights, and adds them to ``modules``.
        modules: The layers that are built, by index.
        same: For each copy of a tied weight that shares the memory of a parameter of this actor, that parameter.
        experts: Logical names of the experts' parameters, if experts are divided over actors.
        cuts: How replicas divide the elements of parameters, by logical name; those that are not divided are missing.
        spans: Names of the tensors whose initial values ``make`` knows only in this actor's spans, as they are drawn.
        groups: The actor's groups by key: "gather" has the replicas among which parameters are sharded, "edp.gather"
            those of experts that are divided over actors. Without a group, each actor has all of the parameters.
        shard_storage: Storage of the shards.
        master_storage: Storage of the masters.
        layers: Number of layers of the body in a unit.
        precision: The run's precision, to which layers are cast before their weights are sharded.
        is_own: Whether the layers are the user's, which may use their weights in unusual ways.
        shards: What this actor keeps of parameters, by logical name, in the dtype in which layers compute.
        parts: The spans that it updates of parameters that replicas cut, by logical name. Of a parameter that it keeps
            whole, the span is a view.
        updated: The part of each of ``shards`` that it updates, by logical name.
        masters: The tensors that the optimizer updates, by logical name: those of ``updated``, or fp32 masters of them.
        gathered: The bytes of units that are whole.
    """

    model: Model
    make: Callable[[Sequence[int]], None]
    modules: Mapping[int, nn.Module]
    same: Mapping[str, str]
    experts: Set[str]
    cuts: Mapping[str, ReplicaCut]
    spans: Set[str]
    groups: Mapping[str, Group]
    shard_storage: OffloadStorage
    master_storage: OffloadStorage
    layers: int
    precision: Precision
    is_own: bool
    shards: dict[str, nn.Parameter] = field(default_factory=dict)
    parts: dict[str, Shard] = field(default_factory=dict)
    updated: dict[str, nn.Parameter] = field(default_factory=dict)
    masters: dict[str, nn.Parameter] = field(default_factory=dict)
    gathered: HighWater = field(default_factory=HighWater)
    _tied: dict[str, Unit] = field(default_factory=dict)

    def shard(self, layers: Sequence[int]) -> StageWeights:
        """Build the layers of a stage and shard their weights."""
        units: list[Unit] = []
        uses: list[tuple[int, ...]] = []
        tiles: list[tuple[int, ...]] = []
        for members in self.model.units(layers, self.layers):
            initial = self._built(members)
            own: dict[str, nn.Parameter] = {}
            tied = [self._sort(index, own, initial) for index in members]
            experts = {name: own.pop(name) for name in own.keys() & self.experts}
            if "edp.gather" not in self.groups and not self.shard_storage.is_off_device:
                self._keep(experts, initial)  # no other actor has them
                experts = {}
            unit = [self._unit(one, initial) for one in (own, dict(sorted(experts.items()))) if one]
            units += unit
            for index, shared in zip(members, tied, strict=True):
                units += [one for one in shared if one not in units]
                uses.append(tuple(units.index(one) for one in (*unit, *shared)))
                cut = [self._unit(tile, initial) for tile in self._tiles(index)]
                tiles.append(tuple(range(len(units), len(units) + len(cut))))
                units += cut
        weights = StageWeights(units, uses, tiles, is_guarded=self.is_own)
        for number, index in enumerate(layers):
            weights.watch_tiles(number, tiled_in(self.modules[index]))
        return weights

    def _tiles(self, index: int) -> Iterator[dict[str, nn.Parameter]]:
        """Yield the parameters of each tile of a layer, by logical name."""
        for path, module in self.modules[index].named_modules(prefix=self.model.names[index]):
            if isinstance(module, TiledLinear):
                for inner, tile in module.named_children():
                    yield {f"{path}.{inner}.{name}": parameter for name, parameter in tile.named_parameters()}

    def _built(self, members: Sequence[int]) -> dict[str, Tensor]:
        """Build the layers of a unit and cast them.

        Returns:
            What this actor updates of the weights, before the cast, by logical name; {} if they are not cast.
        """
        self.make(members)
        modules = [self.modules[index] for index in members]
        if not self.precision.is_half:
            return {}
        named = ((self.model.names[index], self.modules[index].named_parameters()) for index in members)
        weights = {f"{layer}.{inner}": parameter for layer, inside in named for inner, parameter in inside}
        learning = {name: one.detach() for name, one in weights.items() if one.requires_grad and name not in self.same}
        updated = {name: self._updated(name, weight) for name, weight in learning.items()}
        del weights, learning  # so that the cast frees the memory of the others
        cast(modules, dtype_of(self.precision.layers), dtype_of(self.precision.reduce))
        return {name: weight for name, weight in updated.items() if weight is not None}

    def _updated(self, name: str, weight: Tensor) -> Tensor | None:
        """Return what this actor updates of a weight: the weight, or a copy of a span; None for nothing of it."""
        if name not in self.cuts:
            return weight
        part = self.cuts[name].shard(weight)
        return None if part is None else part.take(weight).clone()

    def _unit(self, parameters: Mapping[str, nn.Parameter], initial: Mapping[str, Tensor]) -> Unit:
        """Shard parameters that the same actors hold as a unit, and create the masters of what this actor updates."""
        group = self.groups.get("gather" if self.experts.isdisjoint(parameters) else "edp.gather")
        cuts = dict.fromkeys(parameters, ReplicaCut(0, 0, 1)) if group is None else self.cuts
        spans = {name for name in parameters if self.model.originals.get(name, name) in self.spans}
        unit = Unit(parameters, cuts, group, self.shard_storage, self.gathered, spans)
        self.parts |= unit.parts
        self._keep(unit.shards, initial)
        return unit

    def _keep(self, shards: Mapping[str, nn.Parameter], initial: Mapping[str, Tensor]) -> None:
        """Keep shards, or parameters that are always whole, and create the masters of what this actor updates."""
        self.shards |= shards
        for name, shard in shards.items():
            own = shard if name in self.parts else self._own(name, shard)
            if own is not None:
                self.updated[name] = own
                self.masters[name] = master_of(own, initial.get(name, own), self.precision, self.master_storage)

    def _own(self, name: str, whole: nn.Parameter) -> nn.Parameter | None:
        """Return what this actor updates of a parameter that it keeps whole; None for nothing of it."""
        if name not in self.cuts:
            return whole
        part = self.cuts[name].shard(whole)
        if part is None:
            return None
        self.parts[name] = part
        return nn.Parameter(part.take(whole.detach()))

    def _sort(self, index: int, own: dict[str, nn.Parameter], initial: Mapping[str, Tensor]) -> list[Unit]:
        """Add the parameters of a layer that no other layer shares to ``own``, and return the units of shared ones."""
        tied = []
        for inner, parameter in self.modules[index].named_parameters():
            name = f"{self.model.names[index]}.{inner}"
            source = self.same.get(name, name)
            if source in self.same.values() and parameter.requires_grad:
                if source not in self._tied:
                    self._tied[source] = self._unit({source: parameter}, initial)
                tied.append(self._tied[source])
            elif parameter.requires_grad and tile_of(name) is None:
                own[name] = parameter
        return tied
