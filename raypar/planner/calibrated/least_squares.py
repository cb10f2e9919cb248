"""A fit by least squares in plain Python, for predictions that are made before numpy or torch is there."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.schedules.float_sum import float_sum

_RIDGE = 1e-12  # added to the diagonal of normal equations of columns between 0 and 1: few points, no division by zero


def relative_fit(terms: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the coefficients whose sums of terms are nearest to values, an error counting as a part of its value.

    Args:
        terms: For each value its terms, which are not negative.
        values: The positive values.

    Returns:
        The coefficient of each term.
    """
    count = len(terms[0])
    rows = [[term / value for term in each] for each, value in zip(terms, values, strict=True)]
    sizes = [max(row[place] for row in rows) or 1.0 for place in range(count)]
    scaled = [[one / size for one, size in zip(row, sizes, strict=True)] for row in rows]
    equations = [
        [
            *(float_sum(row[i] * row[j] for row in scaled) + (_RIDGE if i == j else 0.0) for j in range(count)),
            float_sum(row[i] for row in scaled),
        ]
        for i in range(count)
    ]
    return [one / size for one, size in zip(_solved(equations), sizes, strict=True)]


def _solved(equations: list[list[float]]) -> list[float]:
    """Solve linear equations, each a row of coefficients and its right side, by elimination with pivots."""
    count = len(equations)
    for place in range(count):
        pivot = max(range(place, count), key=lambda row: abs(equations[row][place]))
        equations[place], equations[pivot] = equations[pivot], equations[place]
        for row in range(place + 1, count):
            part = equations[row][place] / equations[place][place]
            for column in range(place, count + 1):
                equations[row][column] -= part * equations[place][column]
    found = [0.0] * count
    for place in reversed(range(count)):
        known = float_sum(equations[place][column] * found[column] for column in range(place + 1, count))
        found[place] = (equations[place][count] - known) / equations[place][place]
    return found
