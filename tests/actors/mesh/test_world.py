"""Ranks, their names and their groups, with and without parameter servers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.mesh.memberships import memberships
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import World

WORLDS = st.builds(World, st.builds(Mesh, pp=st.integers(1, 4), dp=st.integers(1, 4)), servers=st.integers(0, 3))
TENSORS = st.integers(1, 4) | st.sampled_from(["2d:2x2", "2.5d:2x2x2", "3d:2x2x2"])
MESHES = st.builds(Mesh, pp=st.integers(1, 3), dp=st.integers(1, 3), tp=TENSORS)
HYBRID = st.builds(Mesh, pp=st.integers(1, 2), dp=st.just(4), tp=TENSORS, shard=st.sampled_from([1, 2]))
DIVIDED = st.builds(World, MESHES | HYBRID, zero=st.integers(0, 3))
SMALL = {"pp": st.integers(1, 2), "dp": st.integers(1, 3), "tp": st.integers(1, 2)}
EXPERTS = st.builds(World, st.builds(Mesh, **SMALL, expert_actors=st.integers(1, 3)), zero=st.integers(0, 3))


@given(st.one_of(WORLDS, DIVIDED, EXPERTS))
def test_members_agree_on_their_groups_and_labels_are_unique(world):
    groups = {}
    for rank in range(world.size):
        for membership in memberships(world, rank):
            assert rank in membership.members
            assert groups.setdefault(membership.name, membership[1:]) == membership[1:]
    for _, name, members in groups.values():
        assert all(name in {one.name for one in memberships(world, rank)} for rank in members)
    assert len({world.label(rank) for rank in range(world.size)}) == world.size


@given(st.one_of(WORLDS, DIVIDED, EXPERTS))
def test_every_actor_can_join_its_groups_in_its_order(world):
    """Whoever waits for a group's members is joined by them before they wait for anybody else: no circle."""
    left = {rank: [one.name for one in memberships(world, rank)] for rank in range(world.size)}
    members = {one.name: one.members for rank in left for one in memberships(world, rank)}
    while any(left.values()):
        formed = {names[0] for names in left.values() if names}
        formed = {name for name in formed if all(left[rank][:1] == [name] for rank in members[name])}
        assert formed, left
        left = {rank: names[1:] if names[:1] and names[0] in formed else names for rank, names in left.items()}


def test_replicas_and_servers_by_name():
    world = World(Mesh(pp=2, dp=2), servers=2)
    assert [world.label(rank) for rank in range(world.size)] == [
        "pp=0 dp=0", "pp=0 dp=1", "pp=1 dp=0", "pp=1 dp=1",
        "server 0 of pp=0", "server 1 of pp=0", "server 0 of pp=1", "server 1 of pp=1",
    ]  # fmt: skip
    assert (world.replica(1), tuple(world.replicas_of(1))) == ((1, 3), (2, 3))
    assert [(key, members) for key, _, _, members in memberships(world, 1)] == [
        ("pp", (1, 3)), ("ps0", (0, 1, 4)), ("ps1", (0, 1, 5)),
    ]  # fmt: skip
    assert [(key, members) for key, _, _, members in memberships(world, 6)] == [
        ("ps0", (2, 3, 6)), ("servers", (4, 5, 6, 7)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "dp", "servers", "reduces"),
    [("all_reduce", 1, 0, False), ("all_reduce", 2, 0, True), ("parameter_server", 1, 3, True)],
)
def test_a_run_without_servers_has_none_whatever_their_number(mode, dp, servers, reduces):
    world = World.of(Mesh(dp=dp), mode, 3, 0)
    assert (world.servers, world.reduces) == (servers, reduces)


@pytest.mark.parametrize(
    ("pp", "dp", "zero", "owners", "updaters"),
    [(2, 1, 1, 1, "pp"), (2, 2, 0, 1, "pp"), (1, 2, 1, 2, "dp"), (2, 2, None, 2, "mesh")],
)
def test_who_updates_what(pp, dp, zero, owners, updaters):
    world = World.of(Mesh(pp=pp, dp=dp), "all_reduce", 1, zero)
    assert (world.owners, world.updaters) == (owners, updaters)
    keys = {membership.key for membership in memberships(world, 0)}
    assert ("mesh" in keys) == (updaters == "mesh")
    ranks = [world.owner_rank(stage, owner, 0) for stage in range(pp) for owner in range(owners)]
    assert ranks == list(range(pp * owners)), "the members of the group in their order"


@given(DIVIDED)
def test_who_updates_agrees_with_those_of_its_own_tensor_rank(world):
    tp = world.mesh.tensor_ranks
    for rank in range(world.size):
        groups = {one.key: one.members for one in memberships(world, rank)}
        others = {member for key, members in groups.items() if not key.startswith("tp") for member in members}
        assert {member % tp for member in others} <= {rank % tp}
        assert groups.get("tp", (rank,)) == world.tensor_group(rank)
    assert [rank for rank in range(world.size) if world.leads(rank)] == list(range(0, world.size, tp))
    assert {rank for dp in range(world.mesh.dp) for rank in world.replica(dp)} == set(range(0, world.size, tp))


def test_who_updates_weights_are_the_members_of_their_group_in_its_order():
    world = World(Mesh(pp=2, dp=2, tp=2), zero=1)
    (mesh,) = [one for one in memberships(world, 3) if one.key == "mesh"]
    assert (mesh.name, mesh.members) == ("mesh/1", (1, 3, 5, 7))
    assert mesh.members[world.owner_rank(1, 0, 1)] == world.mesh.rank(pp=1, dp=0, tp=1)
