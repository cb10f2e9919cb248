"""Actors take the ranks on which they lack least, all together: by brute force over all ways."""

from __future__ import annotations

from itertools import permutations
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.relayout.moves import assigned, lacking
from tests.actors.relayout.test_moves import COLUMNS, ROWS, SIZES


@st.composite
def tables(draw):
    rows = draw(st.integers(1, 4))
    columns = draw(st.integers(rows, 5))
    return draw(st.lists(st.lists(st.integers(0, 9), min_size=columns, max_size=columns), min_size=rows, max_size=rows))


@given(costs=tables())
def test_no_other_way_costs_less(costs):
    found = assigned(costs)
    assert len(set(found)) == len(costs)
    ways = permutations(range(len(costs[0])), len(costs))
    least = min(sum(row[column] for row, column in zip(costs, way, strict=True)) for way in ways)
    assert sum(row[column] for row, column in zip(costs, found, strict=True)) == least


@given(costs=st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), min_size=4, max_size=4))
def test_ways_that_are_not_allowed_are_not_taken(costs):
    """As between nodes: rows 0 and 1 have columns 0 and 1 only, and the others the others."""
    near = lambda row, column: (row < 2) == (column < 2)  # noqa: E731
    table = [[cost if near(row, at) else inf for at, cost in enumerate(line)] for row, line in enumerate(costs)]
    found = assigned(table)
    ways = permutations(range(5), 4)
    least = min(sum(row[column] for row, column in zip(table, way, strict=True)) for way in ways)
    assert sum(row[column] for row, column in zip(table, found, strict=True)) == least < inf


def test_what_an_actor_would_lack_on_a_rank():
    assert lacking(ROWS, ROWS, SIZES) == [[0, 48], [48, 0]]
    assert lacking([ROWS[0], {}], COLUMNS, SIZES) == [[24, 48], [24, 48]]
    assert assigned(lacking(ROWS[::-1], ROWS, SIZES)) == [1, 0]
    assert assigned([]) == []
