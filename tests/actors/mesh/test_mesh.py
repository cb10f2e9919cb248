"""Coordinates and group members of every mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.mesh.mesh import AXES, Mesh

SIZES = st.integers(1, 3)
MESHES = st.builds(Mesh, pp=SIZES, dp=SIZES, cp=SIZES, tp=SIZES)


@given(MESHES)
def test_rank_and_coordinate_are_inverse_and_cover_the_mesh(mesh):
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert [mesh.rank(**coordinate) for coordinate in coordinates] == list(range(mesh.size))
    assert all(list(coordinate) == list(AXES) for coordinate in coordinates)
    assert all(0 <= at < getattr(mesh, axis) for coordinate in coordinates for axis, at in coordinate.items())


@given(MESHES)
def test_an_axis_splits_the_ranks_into_groups_that_differ_in_it_alone(mesh):
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        for index, group in enumerate(groups):
            coordinates = [mesh.coordinate(rank) for rank in group]
            assert [coordinate.pop(axis) for coordinate in coordinates] == list(range(getattr(mesh, axis)))
            assert all(coordinate == coordinates[0] for coordinate in coordinates)
            assert all(mesh.group_of(axis, rank) == (index, group) for rank in group)


@given(MESHES, st.data())
def test_expert_groups_are_neighbours_within_a_stage_and_edp_crosses_them(mesh, data):
    inner = mesh.dp * mesh.cp * mesh.tp
    ep = data.draw(st.sampled_from([n for n in range(1, inner + 1) if inner % n == 0]))
    mesh = replace(mesh, ep=ep)
    if ep > 1 and mesh.inner % (ep * mesh.tp) == 0:
        mesh = replace(mesh, etp=data.draw(st.sampled_from((1, mesh.tp))))
    assert mesh.size == mesh.pp * inner
    for axis, size in (("ep", ep), ("edp", inner // (ep * mesh.expert_ranks))):
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        assert all(len(group) == size for group in groups)
        assert all(len({mesh.coordinate(rank)["pp"] for rank in group}) == 1 for group in groups)
    for rank in range(mesh.size):
        both = set(mesh.group_of("ep", rank)[1]) & set(mesh.group_of("edp", rank)[1])
        assert both == {rank}


def test_tp_is_innermost_and_pp_outermost():
    mesh = Mesh(pp=2, dp=2, tp=2)
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("cp") == tuple((rank,) for rank in range(8))


def test_labels_name_pp_and_the_axes_that_are_split():
    assert Mesh(pp=2).label(1) == "pp=1"
    assert Mesh().label(0) == "pp=0"
    assert Mesh(pp=2, dp=2, tp=4).label(11) == "pp=1 dp=0 tp=3"
    assert Mesh(cp=2).label(1) == "pp=0 cp=1"


def test_a_rank_outside_the_mesh_is_refused():
    with pytest.raises(ValueError, match="rank 4 is outside a mesh of 4 actors"):
        Mesh(pp=4).group_of("pp", 4)
