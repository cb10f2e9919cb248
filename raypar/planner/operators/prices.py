"""What operators and redistributions cost on the tensor ranks of a cluster, in seconds of a microbatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from raypar.actors.collective.routes import Placement, route
from raypar.actors.models.placed_step import FEATURES
from raypar.planner.hardware.cluster import Route
from raypar.planner.operators.operator import Operator
from raypar.planner.timing.roofline import Product, Roofline, Work

_SUM, _ID = 4, 8  # bytes of an element of a summed gradient, and of an id
_MOVES = 5  # times that a forward and a backward read or write the elements of an operator without products


@dataclass(frozen=True)
class Prices:
    """Prices on the actors of one tensor group.

    Attributes:
        ranks: Number of actors.
        roofline: How fast each computes.
        link: What each has to its neighbour.
        element: Bytes of an activation.
        microbatches: Microbatches of a step, which share a sum of gradients.
    """

    ranks: int
    roofline: Roofline
    link: Route
    element: int
    microbatches: int

    def compute(self, one: Operator, strategy: str) -> float:
        """Return the seconds of an operator's forward and backward on one actor."""
        ways = 1 if strategy == "replicated" else self.ranks
        if one.kind == "linear":
            at = {"column": 1, "row": 2}.get(strategy, 0)  # which of rows, outputs and inputs is divided
            sizes = math.prod(one.taken[:-1]), one.made[-1], one.taken[-1]
            rows, outputs, inputs = (size / ways if at == place else size for place, size in enumerate(sizes))
            does = Product(rows, outputs, inputs, self.element)
            back = (does.of_right, does.of_left) if one.learns else (does.of_right,)
            return sum(map(self.roofline.seconds, (does, *back)))
        if one.kind == "view":
            return 0.0
        elements = max(math.prod(one.taken), math.prod(one.made))
        flops = 6.0 * one.weights * math.prod(one.made) / one.made[1] if one.kind == "samples" and one.weights else 0.0
        return self.roofline.seconds(Work(flops, _MOVES * elements * self.element).times(1 / ways))

    def held(self, one: Operator, strategy: str) -> float:
        """Return how many elements of an operator's parameters an actor has, at the most; biases count as whole."""
        divided = strategy in ("column", "row", "embedding")
        return (one.weights - one.bias) / self.ranks + one.bias if divided else one.weights

    def sums(self, one: Operator, strategy: str, made: Placement) -> float:
        """Return the seconds in which gradients of whole weights are summed over the actors."""
        if strategy.startswith("split"):
            count = one.weights
        elif strategy == "row" and made not in ("R", FEATURES):
            count = one.bias
        else:
            return 0.0
        sent = 2 * (self.ranks - 1) / self.ranks * count * _SUM
        return sent / self.link.bandwidth / self.microbatches

    def moved(
        self,
        shape: Sequence[int],
        before: Placement,
        after: Placement,
        gradient: Placement,
        *,
        learns: bool,
        ids: bool = False,
    ) -> float:
        """Return the seconds of a redistribution, there and back.

        Args:
            shape: Shape of the whole tensor.
            before: Its placement.
            after: The placement that it gets.
            gradient: The placement of the gradient of what it becomes.
            learns: Whether there is a way back.
            ids: Whether the tensor has ids.
        """
        ends = [(before, after)]
        if learns and not ids:
            ends.append((gradient, "R" if before == "P" else before))
        return sum(self._one_way(shape, *end, _ID if ids else self.element) for end in ends)

    def _one_way(self, shape: Sequence[int], before: Placement, after: Placement, element: int) -> float:
        last = f"S{len(shape) - 1}"
        here, there = (last if one == FEATURES else one for one in (before, after))
        seconds = 0.0
        for step in route((here,), (there,), shape, (self.ranks,)):
            hops = 2 * math.ceil(math.log2(self.ranks)) if (step.before, step.after) == ("P", "R") else self.ranks - 1
            seconds += self.link.seconds(step.sent * element, hops)
        return seconds
