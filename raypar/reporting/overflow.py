"""The shares of values that a number format cannot hold: by layer in a report, and in words where they are not safe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raypar.actors.mesh.world import World
from raypar.actors.specs.results import RangeCount, RangeKind, StepResult
from raypar.actors.specs.types import Format
from raypar.schedules.formatting import percent

SAFE = 0.01  # a share of overflow below it is safe, as long as it does not rise
NAMED: dict[RangeKind, str] = {
    "activations": "activations",
    "gradients": "gradients",
    "weight_gradients": "gradients of weights",
}


class LayerCount(NamedTuple):
    """How many values of one kind overflow and underflow in a layer.

    Attributes:
        layer: Logical name of the layer.
        kind: Its outputs (activations), the gradients of those, or the gradients of its weights.
        microbatch: Number of the microbatch in the whole step, over all replicas; None for gradients of weights, and
            for sums over a step.
        actor: Name of the actor that counted; of a sum, the actor with the largest share of overflow.
        values: Number of values.
        over: How many of them overflow.
        under: How many of them underflow.
    """

    layer: str
    kind: RangeKind
    microbatch: int | None
    actor: str
    values: int
    over: int
    under: int

    @property
    def figures(self) -> tuple[int, int, int]:
        """The number of values, and how many overflow and underflow."""
        return self.values, self.over, self.under

    @property
    def overflow(self) -> float:
        """The share of values that overflow, 0 to 1."""
        return self.over / self.values if self.values else 0.0

    @property
    def underflow(self) -> float:
        """The share of values that underflow, 0 to 1."""
        return self.under / self.values if self.values else 0.0


@dataclass(frozen=True, repr=False)
class Overflow:
    """What a step's values are against the range of a number format.

    Attributes:
        format: The format.
        counts: The counts of each layer, kind, microbatch and actor, in the order of the layers.
    """

    format: Format
    counts: tuple[LayerCount, ...]

    def layers(self) -> list[LayerCount]:
        """Return the sums over the step: one count for each layer and kind, in the order of the layers.

        A sum names the microbatch and the actor with the largest share of overflow; no microbatch if there is none.
        """
        groups: dict[tuple[str, RangeKind], list[LayerCount]] = {}
        for count in self.counts:
            groups.setdefault((count.layer, count.kind), []).append(count)
        return [_sum(counts) for counts in groups.values()]

    def to_dict(self) -> dict[str, Any]:
        """Return the sums over the step, for a line of JSON."""
        return {"format": self.format, "layers": [count._asdict() for count in self.layers()]}

    def __repr__(self) -> str:
        worst = max(self.layers(), key=lambda count: count.overflow, default=None)
        if worst is None or not worst.over:
            return f"<Overflow: nothing overflows {self.format}>"
        return f"<Overflow: {_share_text(worst, self.format)}>"


class OverflowWarnings:
    """The rule for a run's shares of overflow: below 1 % and not rising is safe.

    A layer that is not safe is named when its share is 1 % or more for the first time, and whenever the share rises.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[str, RangeKind], float] = {}

    def of(self, step: int, overflow: Overflow) -> Iterator[str]:
        """Yield a warning for each layer and kind that is not safe any more.

        Args:
            step: The step, counted from 1.
            overflow: Its counts.
        """
        for count in overflow.layers():
            before = self._before.get((count.layer, count.kind))
            self._before[count.layer, count.kind] = count.overflow
            if (count.overflow >= SAFE) if before is None else (count.overflow > before):
                rise = "" if before is None else f", up from {percent(before)}"
                yield (
                    f"step {step:,}: {_share_text(count, overflow.format)}{rise}. "
                    f"Safe is under {percent(SAFE)} and not rising"
                )


def joined_overflow(results: Sequence[StepResult], world: World, format: Format) -> Overflow | None:
    """Join the counts of the actors. What several actors hold alike counts once.

    Args:
        results: The actors' results, by rank.
        world: The ranks.
        format: The number format.

    Returns:
        The counts, with the layers in the order of the pipeline; None if nothing was counted in this step.
    """
    parts: dict[tuple[Any, ...], tuple[RangeCount, str]] = {}
    for rank, result in enumerate(results):
        for each in result.ranges:
            parts.setdefault((each.layer_index, each.kind, each.microbatch, each.part), (each, world.label(rank)))
    sums: dict[tuple[Any, ...], LayerCount] = {}
    for each, actor in sorted(parts.values(), key=_order):
        key = each.layer, each.kind, each.microbatch, actor
        before = sums.get(key) or LayerCount(*key, 0, 0, 0)
        figures = before.values + each.values, before.over + each.over, before.under + each.under
        sums[key] = LayerCount(*key, *figures)
    return Overflow(format, tuple(sums.values())) if sums else None


def _order(counted: tuple[RangeCount, str]) -> tuple[int, int, int]:
    """Return the sort key of a count: by layer, then by kind, then by microbatch."""
    count, _ = counted
    return count.layer_index, list(NAMED).index(count.kind), -1 if count.microbatch is None else count.microbatch


def _sum(counts: Sequence[LayerCount]) -> LayerCount:
    worst = max(counts, key=lambda count: (count.overflow, count.underflow))
    values, over, under = (sum(figures) for figures in zip(*(count.figures for count in counts), strict=True))
    return LayerCount(worst.layer, worst.kind, worst.microbatch if over else None, worst.actor, values, over, under)


def _share_text(count: LayerCount, format: Format) -> str:
    where = "" if count.microbatch is None else f"in microbatch {count.microbatch}, "
    return (
        f"{percent(count.overflow)} of the {NAMED[count.kind]} of {count.layer} overflow {format} "
        f"(most of them {where}on actor {count.actor})"
    )
