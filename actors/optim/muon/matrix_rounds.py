"""Which actor orthogonalizes which matrix, in which round of exchanges; the planner counts by the same rule."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from raypar.actors.sharding import Shape

Round = dict[str, int]  # the member that orthogonalizes each matrix, by logical name


def matrix_cost(shape: Shape) -> int:
    """Return what an iteration of Newton-Schulz costs, in products of two numbers but for a constant factor.

    Args:
        shape: Rows and columns of the matrix.
    """
    rows, columns = shape
    return rows * columns * min(rows, columns)


def matrix_rounds(shapes: Mapping[str, Shape], holders: Mapping[str, Collection[int]]) -> list[Round]:
    """Share matrices out over actors, in rounds of one matrix an actor at the most.

    The matrices go round the actors by cost, so those of a round cost about as much. Every actor computes the same.

    Args:
        shapes: Rows and columns of each matrix, by logical name.
        holders: The members, one or more, among which each may be given.

    Returns:
        The rounds, in which matrices are in the order of their costs.
    """
    found, given = list[Round](), dict[int, int]()  # by member, how many it has
    for name in sorted(shapes, key=lambda one: -matrix_cost(shapes[one])):
        member = min(holders[name], key=lambda one: (given.get(one, 0), one))
        number = given[member] = given.get(member, 0) + 1
        found += [{} for _ in range(number - len(found))]
        found[number - 1][name] = member
    return found
