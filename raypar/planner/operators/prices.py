"""The costs of operators and redistributions on the tensor ranks of a cluster, in seconds and bytes of a microbatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raypar.actors.collective.routes import Placement, route
from raypar.actors.models.placed_step import FEATURES
from raypar.planner.hardware.cluster import RingRoute
from raypar.planner.operators.operator import Operator
from raypar.planner.timing.roofline import Product, Roofline, Work
from raypar.schedules.float_sum import float_sum

_SUM, _ID = 4, 8  # bytes of an element of a summed gradient, and of an id
_MOVES = 5  # times that a forward and a backward read or write the elements of an operator without products


class Sent(NamedTuple):
    """The messages of a member.

    Attributes:
        bytes: Bytes of a microbatch.
        seconds: How long they take.
    """

    bytes: float = 0.0
    seconds: float = 0.0

    def plus(self, other: Sent) -> Sent:
        """Return both together."""
        return Sent(self.bytes + other.bytes, self.seconds + other.seconds)


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
    link: RingRoute
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
            return float_sum(map(self.roofline.seconds, (does, *back)))
        if one.kind == "view":
            return 0.0
        elements = max(math.prod(one.taken), math.prod(one.made))
        flops = 6.0 * one.weights * math.prod(one.made) / one.made[1] if one.kind == "samples" and one.weights else 0.0
        return self.roofline.seconds(Work(flops, _MOVES * elements * self.element).times(1 / ways))

    def held(self, one: Operator, strategy: str) -> float:
        """Return how many elements of an operator's parameters an actor has, at the most; biases count as whole."""
        divided = strategy in ("column", "row", "embedding")
        return (one.weights - one.bias) / self.ranks + one.bias if divided else one.weights

    def sums(self, one: Operator, strategy: str, made: Placement) -> Sent:
        """Return the messages that sum gradients of whole weights over the actors, a microbatch's share of them."""
        if strategy.startswith("split"):
            count = one.weights
        elif strategy == "row" and made not in ("R", FEATURES):
            count = one.bias
        else:
            return Sent()
        sent = 2 * (self.ranks - 1) / self.ranks * count * _SUM / self.microbatches
        return Sent(sent, sent / self.link.bandwidth)

    def moved(
        self,
        shape: Sequence[int],
        before: Placement,
        after: Placement,
        gradient: Placement,
        *,
        learns: bool,
        ids: bool = False,
    ) -> Sent:
        """Return the messages of a redistribution in the forward and the backward.

        Args:
            shape: Shape of the whole tensor.
            before: Its placement.
            after: The placement that it gets.
            gradient: The placement of the gradient of the result.
            learns: Whether there is a way back.
            ids: Whether the tensor has ids.
        """
        there = self._one_way(shape, before, after, _ID if ids else self.element)
        if ids or not learns:
            return there
        return there.plus(self._one_way(shape, gradient, "R" if before == "P" else before, self.element))

    def _one_way(self, shape: Sequence[int], before: Placement, after: Placement, element: int) -> Sent:
        last = f"S{len(shape) - 1}"
        here, there = (last if one == FEATURES else one for one in (before, after))
        total = Sent()
        for step in route((here,), (there,), shape, (self.ranks,)):
            hops = 2 * math.ceil(math.log2(self.ranks)) if (step.before, step.after) == ("P", "R") else self.ranks - 1
            count = step.sent * element
            total = total.plus(Sent(count, self.link.seconds(count, hops)))
        return total
