"""Actors take the ranks on which they lack least, all together: by brute force over all ways."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.relayout.assignment import assigned, lacking
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


def test_what_an_actor_would_lack_on_a_rank():
    assert lacking(ROWS, ROWS, SIZES) == [[0, 48], [48, 0]]
    assert lacking([ROWS[0], {}], COLUMNS, SIZES) == [[24, 48], [24, 48]]
    assert assigned(lacking(ROWS[::-1], ROWS, SIZES)) == [1, 0]
    assert assigned([]) == []
