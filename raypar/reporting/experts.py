"""The load of experts and the auxiliary losses of a step, joined over the actors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypar.actors.mesh.world import World
from raypar.actors.specs.results import ExpertLoad, Shadowed, StepResult
from raypar.schedules.float_sum import float_sum


@dataclass(frozen=True, repr=False)
class Loads:
    """How many tokens of a step have chosen each expert.

    Attributes:
        layers: The counts by layer, in the order of the layers.
    """

    layers: tuple[ExpertLoad, ...]

    @property
    def max_load(self) -> float:
        """The load of the expert with the most tokens over the mean of its layer, in the layer where it is largest."""
        return uneven(self.worst)

    @property
    def worst(self) -> ExpertLoad:
        """The layer in which the load is least even."""
        return max(self.layers, key=uneven)

    @property
    def dropped(self) -> float:
        """The share of choices that were dropped, over all layers, 0 to 1."""
        asked = sum(sum(layer.asked) for layer in self.layers)
        return sum(sum(layer.dropped) for layer in self.layers) / asked if asked else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the counts for a line of JSON; ``dropped`` only where choices were."""
        rows = [
            {"layer": layer.layer, "asked": layer.asked, **({"dropped": layer.dropped} if any(layer.dropped) else {})}
            for layer in self.layers
        ]
        return {"layers": rows}

    def __repr__(self) -> str:
        dropped = f", {self.dropped:.1%} dropped" if self.dropped else ""
        return f"<Loads of {len(self.layers)} layers: max/mean {self.max_load:.3g} in {self.worst.layer}{dropped}>"


def uneven(load: ExpertLoad) -> float:
    """Return the largest load of an expert over the mean of the layer: 1 if all are equal, and if there are none."""
    mean = sum(load.asked) / len(load.asked)
    return max(load.asked) / mean if mean else 1.0


def loads_of(results: Sequence[StepResult]) -> Loads | None:
    """Sum the tokens over the actors.

    Args:
        results: The actors' results, by rank.

    Returns:
        The loads; None if the model has no experts.
    """
    sums: dict[str, ExpertLoad] = {}
    for load in (load for result in results for load in result.loads):
        before = sums.get(load.layer)
        sums[load.layer] = load if before is None else _sum(before, load)
    return Loads(tuple(sums[layer] for layer in sorted(sums, key=_order))) if sums else None


def shadows_of(results: Sequence[StepResult]) -> tuple[Shadowed, ...]:
    """Add up which experts were shadowed, over the groups of actors that share experts out, in the order of layers."""
    sums: dict[str, Shadowed] = {}
    for one in (one for result in results for one in result.shadows):
        layer, times, without, having = sums.get(one.layer, Shadowed(one.layer, (0,) * len(one.times), 0.0, 0.0))
        sums[layer] = Shadowed(layer, _added(times, one.times), without + one.without, having + one.having)
    return tuple(sums[layer] for layer in sorted(sums, key=_order))


def losses_of_layers(results: Sequence[StepResult], world: World) -> dict[str, dict[str, float]]:
    """Average the auxiliary losses over the replicas.

    Args:
        results: The actors' results, by rank.
        world: The ranks.

    Returns:
        By kind and layer, the losses as they are in the objective of the step.
    """
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    losses = [loss for result in results for loss in result.auxiliary]
    for loss in sorted(losses, key=lambda loss: _order(loss.layer)):
        by_layer = found[loss.kind]
        by_layer[loss.layer] = by_layer.get(loss.layer, 0.0) + loss.value / world.replicas
    return dict(found)


def totals(losses: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return auxiliary losses by kind, summed over the layers."""
    return {kind: float_sum(by_layer.values()) for kind, by_layer in losses.items()}


def figures(aux: Mapping[str, float], loads: Loads | None) -> list[tuple[str, str]]:
    """Summarize a step's experts in rows of a name and a figure."""
    rows = [(f"{kind} loss", f"{value:.4g}") for kind, value in aux.items()]
    if loads is not None:
        rows.append(("expert load", f"max/mean {loads.max_load:.2f} in {loads.worst.layer}"))
        rows += [("choices dropped", f"{loads.dropped:.1%}")] if loads.dropped else []
    return rows


def _sum(one: ExpertLoad, other: ExpertLoad) -> ExpertLoad:
    return ExpertLoad(one.layer, _added(one.asked, other.asked), _added(one.dropped, other.dropped))


def _added(one: Iterable[int], other: Iterable[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _order(layer: str) -> list[tuple[int, str]]:
    """Return the sort key of a layer: numbers in its name count as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", layer)]
