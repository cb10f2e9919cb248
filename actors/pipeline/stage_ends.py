"""The inputs and outputs of a stage: divided into those of neighbouring stages and those of skip connections."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from torch import Tensor

from raypar.actors.autograd.backward import GraphEnd
from raypar.actors.models.skip_connections import Ends, StageSkips, crossing_layers
from raypar.actors.tensors import Values


class StageEnds:
    """Divides the inputs and outputs of a stage, in which the tensors of skips follow those of the neighbour.

    Args:
        skips: The skips that begin or end in the stage.
        takes_data: Whether inputs from the previous stage need no gradients: data, or outputs of frozen stages.
        first_learning: The first stage whose outputs need gradients; skips from earlier stages get none.
    """

    def __init__(self, skips: StageSkips, *, takes_data: bool, first_learning: int = 0) -> None:
        self._skips, self._takes_data, self._first_learning = skips, takes_data, first_learning
        self.pairs, self.kept = skips.pairs, crossing_layers(skips.given)
        self._taken = crossing_layers(skips.taken)
        self._shares: tuple[int, ...] = ()  # number of gradients of the previous stage and of each skip

    def inputs(self, values: Values) -> tuple[Values, dict[int, Tensor]]:
        """Divide a forward's inputs: the previous stage's outputs, and the outputs of skipped layers by index."""
        own = len(values) - len(self._taken)
        return values[:own], dict(zip(self._taken, values[own:], strict=True))

    def given(self, outputs: Values) -> tuple[Values, dict[int, Values]]:
        """Divide a forward's outputs: the inputs of the next stage, and of each later stage at the end of a skip."""
        own = len(outputs) - len(self.kept)
        starts = zip(self._skips.given, _starts(self._skips.given, own), strict=True)
        return outputs[:own], {target: outputs[at : at + len(layers)] for (target, layers), at in starts}

    def divided_gradients(self, gradients: Values) -> tuple[Values, dict[int, Values]]:
        """Divide a backward's gradients: those of the previous stage, and of each stage at the beginning of a skip."""
        if not gradients:
            return (), {source: () for source, _ in self._skips.taken}
        ends = [*accumulate(self._shares)]
        parts = [gradients[end - share : end] for share, end in zip(self._shares, ends, strict=True)]
        return parts[0], {source: part for (source, _), part in zip(self._skips.taken, parts[1:], strict=True)}

    def wanted(self, inputs: Values) -> list[bool]:
        """Return which inputs of a forward need gradients."""
        sources = [(len(inputs) - len(self._taken), not self._takes_data)]
        sources += [(len(layers), source >= self._first_learning) for source, layers in self._skips.taken]
        learns = [does for count, does in sources for _ in range(count)]
        wanted = [does and value.is_floating_point() for does, value in zip(learns, inputs, strict=True)]
        starts = accumulate((count for count, _ in sources[:-1]), initial=0)
        self._shares = tuple(sum(wanted[at : at + count]) for at, (count, _) in zip(starts, sources, strict=True))
        return wanted

    def tail(self, outputs: Values) -> GraphEnd:
        """Return the end of the graph: the floating-point outputs, which can have gradients."""
        return GraphEnd(tuple([value for value in self.in_order(outputs) if value.is_floating_point()]))

    def in_order(self, values: Values) -> Values:
        """Return outputs, or their gradients, in the order in which one process adds up gradients: the last first."""
        return values[::-1] if self._skips.given else values


def _starts(ends: Ends, first: int) -> Iterator[int]:
    """Return the index of each end's first tensor in a tuple that begins at ``first``."""
    return accumulate((len(layers) for _, layers in ends[:-1]), initial=first) if ends else iter(())
