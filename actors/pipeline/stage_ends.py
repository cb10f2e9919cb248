"""Where the tensors that enter and leave a stage belong: the neighbouring stages, and those at the ends of skips."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from torch import Tensor

from raypar.actors.autograd.backward import GraphEnd
from raypar.actors.models.skip_connections import Ends, StageSkips, crossing_layers
from raypar.actors.tensors import Values


class StageEnds:
    """Divides what a stage takes and makes, in which the tensors of skips stand behind those of its neighbour.

    Args:
        skips: The skips that begin or end in the stage.
        takes_data: Whether what it takes of the stage before needs no gradients: data, or what frozen stages made.
        first_learning: The first stage whose outputs need gradients; skips from those before it get none.
    """

    def __init__(self, skips: StageSkips, *, takes_data: bool, first_learning: int = 0) -> None:
        self._skips, self._takes_data, self._first_learning = skips, takes_data, first_learning
        self.pairs, self.kept = skips.pairs, crossing_layers(skips.given)
        self._taken = crossing_layers(skips.taken)
        self._shares: tuple[int, ...] = ()  # how many gradients a backward makes for the stage before and for each skip

    def inputs(self, values: Values) -> tuple[Values, dict[int, Tensor]]:
        """Divide what a forward takes: what the stage before made, and the outputs of skipped layers by index."""
        own = len(values) - len(self._taken)
        return values[:own], dict(zip(self._taken, values[own:], strict=True))

    def given(self, outputs: Values) -> tuple[Values, dict[int, Values]]:
        """Divide what a forward made: what the next stage takes, and each later one at the end of a skip."""
        own = len(outputs) - len(self.kept)
        starts = zip(self._skips.given, _starts(self._skips.given, own), strict=True)
        return outputs[:own], {target: outputs[at : at + len(layers)] for (target, layers), at in starts}

    def parted(self, gradients: Values) -> tuple[Values, dict[int, Values]]:
        """Divide what a backward made: what the stage before gets, and each earlier one at the beginning of a skip."""
        if not gradients:
            return (), {source: () for source, _ in self._skips.taken}
        ends = [*accumulate(self._shares)]
        parts = [gradients[end - share : end] for share, end in zip(self._shares, ends, strict=True)]
        return parts[0], {source: part for (source, _), part in zip(self._skips.taken, parts[1:], strict=True)}

    def wanted(self, inputs: Values) -> list[bool]:
        """Return which inputs of a forward need gradients."""
        givers = [(len(inputs) - len(self._taken), not self._takes_data)]
        givers += [(len(layers), source >= self._first_learning) for source, layers in self._skips.taken]
        learns = [does for count, does in givers for _ in range(count)]
        wanted = [does and value.is_floating_point() for does, value in zip(learns, inputs, strict=True)]
        starts = accumulate((count for count, _ in givers[:-1]), initial=0)
        self._shares = tuple(sum(wanted[at : at + count]) for at, (count, _) in zip(starts, givers, strict=True))
        return wanted

    def tail(self, outputs: Values) -> GraphEnd:
        """Return the end of the graph: the outputs that can have gradients, which are floating-point."""
        return GraphEnd(tuple([value for value in self.in_order(outputs) if value.is_floating_point()]))

    def in_order(self, values: Values) -> Values:
        """Return outputs, or their gradients, in the order in which one process adds up gradients: the latest first."""
        return values[::-1] if self._skips.given else values


def _starts(ends: Ends, first: int) -> Iterator[int]:
    """Return where the tensors of each end begin in one tuple, of which the first ones begin at a place."""
    return accumulate((len(layers) for _, layers in ends[:-1]), initial=first) if ends else iter(())
