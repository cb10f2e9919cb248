"""Skip connections: the output of a layer goes to a later layer too, besides the next one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from raypar.actors.autograd.torch_private import num_writes
from raypar.actors.tensors import Values

Skips = Sequence[tuple[int, int]]  # pairs of layers, the earlier one first
# numbers of other stages, each with the layers whose outputs go there or come from there
Ends = tuple[tuple[int, tuple[int, ...]], ...]


def skip_faults(skips: Skips, num_layers: int) -> Iterator[str]:
    """Yield a message for each pair that is no skip connection.

    Args:
        skips: Pairs of indices of layers.
        num_layers: Number of layers.
    """
    for index, (source, target) in enumerate(skips):
        message = f"model.skips has ({source}, {target})"
        if not 0 <= source < num_layers or not 0 <= target < num_layers:
            yield f"{message}, and the layers are 0 to {num_layers - 1}: correct it"
        elif target <= source:
            yield f"{message}, which does not go forward: give the earlier layer first"
        elif target == source + 1:
            yield f"{message}, and layers.{target} gets what layers.{source} returns in any case: leave it out"
        elif (source, target) in [*skips][:index]:
            yield f"{message} twice: leave one out"


@dataclass(frozen=True)
class StageSkips:
    """The skips that begin or end in one stage.

    Attributes:
        pairs: Those that end in it, as pairs of layers.
        taken: The earlier stages that send it outputs, in order, with the layers of these outputs.
        given: The later stages that it sends outputs to, in order, with the layers of these outputs.
    """

    pairs: tuple[tuple[int, int], ...] = ()
    taken: Ends = ()
    given: Ends = ()


NO_SKIPS = StageSkips()


def stage_skips(skips: Skips, parts: Sequence[Sequence[int]]) -> tuple[StageSkips, ...]:
    """Return the skips of each stage. An output goes to a stage once, however many layers there take it.

    Args:
        skips: Pairs of layers.
        parts: The indices of the layers of each stage.
    """
    stage_of = {layer: stage for stage, part in enumerate(parts) for layer in part}
    ends: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for source, target in skips:
        if stage_of[source] != stage_of[target]:
            ends[stage_of[source], stage_of[target]].add(source)
    crossing = sorted((pair, tuple(sorted(layers))) for pair, layers in ends.items())
    return tuple(
        StageSkips(
            tuple(pair for pair in skips if stage_of[pair[1]] == stage),
            tuple((source, layers) for (source, target), layers in crossing if target == stage),
            tuple((target, layers) for (source, target), layers in crossing if source == stage),
        )
        for stage in range(len(parts))
    )


def skips_between(skips: Skips, parts: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of stages between which there are skips; the arguments are those of ``stage_skips``."""
    every = stage_skips(skips, parts)
    return tuple((stage, target) for stage, one in enumerate(every) for target, _ in one.given)


class SkipError(ValueError):
    """What a layer returns can't be given to a later one."""


class Skipped:
    """The outputs of layers that later ones take, in one forward of all layers or of a stage.

    Args:
        skips: Pairs of layers whose later one is in the forward.
        names: The logical name of each layer.
        kept: Further layers in the forward whose outputs ``value`` must return.
        given: Outputs of layers before the forward, by the layer's index.
    """

    def __init__(
        self, skips: Skips, names: Sequence[str], kept: Sequence[int] = (), given: Mapping[int, Tensor] | None = None
    ) -> None:
        self._names = names
        self._sources: defaultdict[int, list[int]] = defaultdict(list)
        for source, target in skips:
            self._sources[target].append(source)
        self._wanted = {*kept, *(source for source, _ in skips)}
        self._values = {layer: (value, num_writes(value)) for layer, value in (given or {}).items()}

    def inputs(self, layer: int, values: Values) -> Values:
        """Return what a layer takes: what the layer before returned, then the outputs of its skips, in their order."""
        return (*values, *map(self.value, self._sources[layer])) if layer in self._sources else values

    def keep(self, layer: int, outputs: Values) -> None:
        """Keep the output of a layer if it is wanted. Raises SkipError if that is not one tensor."""
        if layer not in self._wanted:
            return
        if len(outputs) != 1:
            raise SkipError(
                f"{self._names[layer]} returns {len(outputs)} tensors, and model.skips give its output to a later "
                "layer: return one tensor there"
            )
        self._values[layer] = outputs[0], num_writes(outputs[0])

    def value(self, layer: int) -> Tensor:
        """Return the output of a layer. Raises ValueError if another layer wrote into it since."""
        value, writes = self._values[layer]
        if num_writes(value) != writes:
            raise ValueError(
                f"a layer writes into the output of {self._names[layer]}, which model.skips give to a later one too: "
                "compute out of place there (inplace=False), or clone it"
            )
        return value


def crossing_layers(ends: Ends) -> tuple[int, ...]:
    """Return the layers whose outputs cross, in the order of their tensors in a tuple."""
    return tuple(chain.from_iterable(layers for _, layers in ends))
