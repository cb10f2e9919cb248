"""The assignment of actors to the ranks of another layout that moves the fewest bytes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from raypar.actors.relayout.moves import Boxes, common, volume


def lacking(held: Sequence[Boxes], wanted: Sequence[Boxes], sizes: Mapping[str, int]) -> list[list[int]]:
    """Return the bytes that each actor lacks for each rank, by rank, then by actor.

    Args:
        held: By actor, the boxes that it has; its boxes of one tensor are disjoint.
        wanted: By rank, the boxes that it needs.
        sizes: Bytes of an element of each tensor.
    """
    costs = []
    for tensors in wanted:
        every = {(tensor, box): volume(box) * sizes[tensor] for tensor, boxes in tensors.items() for box in boxes}
        total, row = sum(every.values()), []
        for has in held:
            shared = 0
            for tensor, box in every:
                parts = (common(box, other) for other in has.get(tensor, ()))
                shared += sum(volume(part) for part in parts if part is not None) * sizes[tensor]
            row.append(total - shared)
        costs.append(row)
    return costs


def assigned(costs: Sequence[Sequence[float]]) -> list[int]:
    """Return a distinct column for each row, so that the sum of their costs is least.

    Args:
        costs: By row, the cost of each column; at least as many columns as rows.

    Source: Kuhn 1955, "The Hungarian Method for the Assignment Problem", with the potentials of Jonker and Volgenant
    1987: n^2 m steps for n rows and m columns.
    """
    rows, columns = len(costs), len(costs[0]) if costs else 0
    of_row, of_column = [0.0] * (rows + 1), [0.0] * (columns + 1)
    taken, before = [0] * (columns + 1), [0] * (columns + 1)  # rows and columns are counted from 1; 0: none
    for row in range(1, rows + 1):
        taken[0], column = row, 0
        least, used = [math.inf] * (columns + 1), [False] * (columns + 1)
        while taken[column]:
            used[column] = True
            here = taken[column]
            delta = math.inf
            then = 0
            for other in range(1, columns + 1):
                if used[other]:
                    continue
                cost = costs[here - 1][other - 1] - of_row[here] - of_column[other]
                if cost < least[other]:
                    least[other], before[other] = cost, column
                if least[other] < delta:
                    delta, then = least[other], other
            for other in range(columns + 1):
                if used[other]:
                    of_row[taken[other]] += delta
                    of_column[other] -= delta
                else:
                    least[other] -= delta
            column = then
        while column:
            taken[column] = taken[before[column]]
            column = before[column]
    by_row = {row: column for column, row in enumerate(taken) if column and row}
    return [by_row[row] - 1 for row in range(1, rows + 1)]
