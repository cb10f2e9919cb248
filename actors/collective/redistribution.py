"""Redistribution of a tensor over actors from one placement to another, with the fewest bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from raypar.actors.collective.autograd import (
    all_gathered,
    all_reduced,
    exchanged,
    own_part,
    reduce_scattered,
    through,
)
from raypar.actors.collective.group import Group
from raypar.actors.collective.routes import CollectiveStep, Placement, State, route, split_dim


def redistribute(
    x: Tensor,
    groups: Sequence[Group],
    before: Sequence[Placement],
    after: Sequence[Placement],
    gradient: Sequence[Placement] | None = None,
) -> Tensor:
    """Redistribute a tensor; the backward redistributes its gradient back, each by the route with the fewest bytes.

    The gradient of a replicated or a partial tensor is replicated, that of a split one is split alike. All members of
    the groups call it.

    Args:
        x: This member's part, of any shape.
        groups: By axis, the group of this member; see ``routes`` for placements over several axes.
        before: By axis, the placement of the tensor.
        after: By axis, the placement of the result.
        gradient: By axis, the placement of the result's gradient, if that differs: "P" on an axis whose members use a
            replicated result differently, so that the sum of their gradients is the gradient.

    Raises:
        ValueError: There is no route.
    """
    sizes = [group.size for group in groups]
    shape = list(x.shape)
    for placement, size in zip(before, sizes, strict=True):
        if (dim := split_dim(placement)) is not None:
            shape[dim] *= size
    there = route(tuple(before), tuple(after), shape, sizes)
    back = route(tuple(gradient) if gradient is not None else _of_gradient(after), _of_gradient(before), shape, sizes)
    return through(x, partial(_moved, groups, there), partial(_moved, groups, back))


def _of_gradient(state: Sequence[Placement]) -> State:
    """Return the placement of the gradient of a tensor."""
    return tuple("R" if placement == "P" else placement for placement in state)


def _moved(groups: Sequence[Group], steps: Sequence[CollectiveStep], x: Tensor) -> Tensor:
    """Take the steps of a route, without autograd."""
    if not steps:
        return x.view_as(x)
    for axis, before, after, _ in steps:
        group, old, new = groups[axis], split_dim(before), split_dim(after)
        if old is not None and new is not None:
            x = exchanged(group, new, old, x)
        elif old is not None:
            x = all_gathered(group, old, x)
        elif new is not None:
            x = own_part(group, new, x) if before == "R" else reduce_scattered(group, new, x)
        else:
            x = all_reduced(group, x)
    return x
