"""Grids of tensor ranks: their spelling, and who stands on a line with whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.mesh.grid import Grid, grid_of, is_grid
from raypar.actors.mesh.mesh import Mesh

SPELLINGS = ["2d:2x2", "2d:3x3", "2.5d:2x2x1", "2.5d:2x2x3", "2.5d:3x3x2", "3d:2x2x2", "3d:3x3x3"]


@pytest.mark.parametrize(
    ("spelling", "grid", "size", "batch"),
    [
        ("2d:2x2", Grid("2d", 2), 4, 2),
        ("2d:12x12", Grid("2d", 12), 144, 12),
        ("2.5d:3x3x2", Grid("2.5d", 3, 2), 18, 6),
        ("2.5d:2x2x1", Grid("2.5d", 2), 4, 2),
        ("3d:2x2x2", Grid("3d", 2), 8, 4),
    ],
)
def test_a_spelling_names_a_grid(spelling, grid, size, batch):
    found = grid_of(spelling)
    assert (found, found.size, found.batch_parts) == (grid, size, batch)
    assert Mesh(pp=2, dp=3, tp=spelling).size == 6 * size


@pytest.mark.parametrize(
    "spelling",
    [
        "", "2d", "2d:2", "2d:2x3", "2d:1x1", "2d:2x2x2", "2D:2x2", "2d: 2x2", "2d:02x02", "2d:-2x-2", "2d:2x2\n",
        "2d:1000x1000", "2.5d:2x2", "2.5d:2x3x2", "2.5d:2x2x0", "2.5d:1x1x2", "3d:2x2", "3d:2x2x3", "3d:1x1x1",
    ],
)  # fmt: skip
def test_nothing_else_does(spelling):
    assert not is_grid(spelling)
    with pytest.raises(ValueError, match="is no grid of tensor ranks"):
        grid_of(spelling)


@given(st.sampled_from(SPELLINGS), st.data())
def test_lines_hold_those_that_differ_along_one_axis(spelling, data):
    grid = grid_of(spelling)
    rank = data.draw(st.integers(0, grid.size - 1))
    lines = dict(grid.lines(rank))
    assert {axis: len(members) for axis, members in lines.items()} == {a: n for a, n in grid.axes.items() if n > 1}
    for axis, members in lines.items():
        assert rank in members
        assert all(dict(grid.lines(member))[axis] == members for member in members), "they agree on it"
        for other, crossing in lines.items():
            assert other == axis or set(crossing) & set(members) == {rank}


def test_rows_are_neighbours_then_columns_then_squares():
    assert dict(grid_of("2.5d:2x2x2").lines(3)) == {"depth": (3, 7), "col": (1, 3), "row": (2, 3)}
    assert dict(grid_of("3d:2x2x2").lines(0)) == {"x": (0, 4), "y": (0, 2), "z": (0, 1)}
