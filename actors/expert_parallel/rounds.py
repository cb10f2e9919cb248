"""An exchange in rounds: rows are sent to some experts and back while other experts compute.

Source: He et al. 2022, "FasterMoE", section 4.2. There rounds are groups of actors; here they are groups of each
actor's experts, so that an expert has all of its rows at once, and the bits are those of one round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from raypar.actors.autograd.apply_function import apply_function
from raypar.actors.collective.group import Group, Handle


class Trip:
    """An all-to-all of rows during other computation, and the all-to-all of their gradients back.

    Args:
        group: The members, all of which begin the same trips in the same order.
        there: Number of rows to each member.
        here: Number of rows from each member.
    """

    def __init__(self, group: Group, there: Sequence[int], here: Sequence[int]) -> None:
        self.there, self.here = there, here
        self._group = group
        self._coming: tuple[Handle, Tensor] | None = None

    def begin(self, rows_ND: Tensor) -> Tensor:
        """Start to send rows, and return the tensor of received rows: its values are undefined until ``end``."""
        return apply_function(_Begin, rows_ND, self)

    def end(self, came_ND: Tensor) -> Tensor:
        """Return the received rows. The backward through this starts to send their gradients."""
        return apply_function(_End, came_ND, self)

    def depart(self, rows_ND: Tensor, there: Sequence[int], here: Sequence[int]) -> Tensor:
        """Start an all-to-all, and return the tensor that it fills."""
        came = rows_ND.new_empty((sum(here), *rows_ND.shape[1:]))
        self._coming = self._group.all_to_all(came, rows_ND.contiguous(), here, there), came
        return came

    def arrive(self) -> Tensor:
        """Wait for the all-to-all that ``depart`` started, and return its tensor."""
        assert self._coming is not None, "a trip that ends has begun"
        (handle, came), self._coming = self._coming, None
        handle.wait()
        return came


def in_rounds(
    parts: Sequence[Tensor], trips: Sequence[tuple[Trip, Trip]], compute: Callable[[int, Tensor], Tensor]
) -> list[Tensor]:
    """Exchange rows with the experts of each round in turn.

    While a round is computed, the rows of the next round and the outputs of the previous one are sent. Autograd runs
    the backwards in reverse order: it starts to send all gradients to the experts, and computes the last round first.

    Args:
        parts: The rows of each round, sorted by receiver.
        trips: For each round, the trip to the experts and the trip back.
        compute: Called with a round and its received rows, returns the outputs of this member's experts.

    Returns:
        The outputs of each round's rows, in their order.
    """
    coming, going = [trips[0][0].begin(parts[0])], []
    for number, (there, back) in enumerate(trips):
        if number + 1 < len(trips):
            coming.append(trips[number + 1][0].begin(parts[number + 1]))
        going.append(back.begin(compute(number, there.end(coming[number]))))
    return [back.end(came) for (_, back), came in zip(trips, going, strict=True)]


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip.depart(rows_ND, trip.there, trip.here)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        trip: Trip = ctx.trip
        return trip.arrive(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, came_ND: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.arrive()
        return came_ND.view_as(came_ND)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        trip: Trip = ctx.trip
        trip.depart(gradient, trip.here, trip.there)
        return (
            gradient,
            None,
        )  # ``_Begin`` gets the gradients from the trip; this return value only triggers its backward
