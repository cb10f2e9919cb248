"""Which actor goes on which node: as much as possible of what talks much on one node."""

from __future__ import annotations

import pytest

import raypar as rp
from raypar.actors.mesh.world import World
from raypar.cluster.placement.devices import ActorResources
from raypar.cluster.placement.placement import Node, place, placement_lines, room, room_text, split_message

CPU, GPU, HALF = ActorResources("cpu", 0.0), ActorResources("cuda", 1.0), ActorResources("cuda", 0.5)


def nodes_of(*cpus, gpus=0, racks=""):
    its = {"GPU": float(gpus)} if gpus else {}
    return [
        Node(f"id{i}", f"n{i}", f"10.0.0.{i}", has := {"CPU": float(n), **its}, has, {"rack": racks[i : i + 1]})
        for i, n in enumerate(cpus)
    ]


def names(world, nodes, share=CPU):
    return " ".join("-" if node is None else node.name[1:] for node in place(world, nodes, share).nodes)


@pytest.mark.parametrize(
    ("mesh", "cpus", "wanted"),
    [
        ({"pp": 4}, (4, 4), "0 0 0 0"),
        ({"pp": 4}, (8, 4), "1 1 1 1"),  # the node with the least room that is enough
        ({"pp": 4}, (2, 2), "0 0 1 1"),  # neighbours beside one another
        ({"pp": 4}, (3, 1), "0 0 0 1"),
        ({"pp": 2, "tp": 2}, (2, 3), "1 1 0 0"),
        ({"dp": 2, "tp": 2}, (3, 3), "0 0 1 1"),  # tp is whole, though the first node has room for a third
        ({"tp": 2}, (1, 1), "0 1"),
        ({"pp": 2, "tp": 2}, (1, 2, 1), "1 1 0 2"),  # one group whole, one that no node has room for
        ({"pp": 2, "dp": 3}, (4, 4), "0 0 0 1 1 1"),  # replicas of a stage together
        ({"dp": 2, "cp": 2}, (3, 3), "0 0 1 1"),
        ({"pp": 2, "dp": 2, "tp": 2}, (4, 4), "0 0 0 0 1 1 1 1"),
        ({"pp": 3}, (1, 1), "0 1 -"),
        ({"pp": 5}, (4, 4, 1, 1), "0 0 0 0 2"),
        ({"pp": 2}, (0, 2), "1 1"),  # a head without room
    ],
)
def test_what_talks_much_is_together(mesh, cpus, wanted):
    assert names(World(rp.Mesh(**mesh)), nodes_of(*cpus)) == wanted


def test_as_many_tensor_groups_are_whole_as_can_be():
    for cpus in ((5, 3), (3, 3, 2), (7, 1), (2, 2, 2, 2), (3, 5)):
        placement = place(World(rp.Mesh(pp=2, dp=2, tp=2)), nodes_of(*cpus), CPU)
        assert not placement.missing
        assert len(placement.split) == 4 - min(4, sum(count // 2 for count in cpus)), cpus


def test_servers_and_expert_actors_take_what_is_left():
    assert names(World(rp.Mesh(pp=2), servers=1), nodes_of(2, 2)) == "0 0 1 1"
    experts = rp.Mesh(pp=1, dp=2, ep=2, expert_actors=2)
    assert names(World(experts), nodes_of(3, 1)) == "0 0 0 1"


def test_a_replica_stays_in_its_rack():
    """Pangu-alpha: tp in a server, pp in a rack, dp across racks; without labels dp would be nearer than pp."""
    world = World(rp.Mesh(pp=2, dp=2, tp=2))
    assert names(world, nodes_of(2, 2, 2, 2, racks="abab")) == "0 0 1 1 2 2 3 3"
    assert names(world, nodes_of(2, 2, 2, 2)) == "0 0 1 1 2 2 3 3"
    across = place(world, nodes_of(2, 2, 2, 2, racks="abab"), CPU)
    racks = [across.nodes[world.mesh.rank(pp=pp, dp=dp)].rack for dp in range(2) for pp in range(2)]
    assert racks == ["a", "a", "b", "b"]


def test_what_is_not_free_does_not_count_unless_all_is_asked_for():
    (node,) = nodes_of(4)
    busy = Node(node.id, node.name, node.address, node.total, {"CPU": 1.0})
    world = World(rp.Mesh(pp=2))
    assert place(world, [busy], CPU).missing == 1
    assert place(world, [busy], CPU, free=False).missing == 0


@pytest.mark.parametrize(
    ("share", "has", "wanted"),
    [
        (CPU, {"CPU": 3.0}, 3),
        (CPU, {"CPU": 0.5}, 0),
        (CPU, {}, 0),
        (GPU, {"CPU": 8.0, "GPU": 2.0}, 2),
        (GPU, {"CPU": 1.0, "GPU": 4.0}, 1),
        (HALF, {"CPU": 8.0, "GPU": 2.0}, 4),
        (HALF, {"CPU": 8.0, "GPU": 1.5}, 2),  # of the second GPU only half is free: it is not counted
        (ActorResources("cuda", 0.3333), {"CPU": 8.0, "GPU": 1.0}, 3),
    ],
)
def test_the_room_of_a_node(share, has, wanted):
    assert room(has, share) == wanted


def test_what_is_told_names_the_nodes():
    world, nodes = World(rp.Mesh(pp=2, dp=2, tp=2)), nodes_of(5, 2, 1)
    placement = place(world, nodes, CPU)
    assert next(placement_lines(world, placement, nodes)).startswith("n0 (10.0.0.0): pp=0 dp=0 tp=0, pp=0 dp=0 tp=1, ")
    split = split_message(world, placement, CPU)
    assert "of pp=1 dp=1 lies on n0 (10.0.0.0) and n2 (10.0.0.2), as no node has room for its 2 actors" in split
    assert "room for 0" in room_text(nodes_of(3), GPU)


def test_of_many_nodes_those_are_named_that_come_nearest():
    share = ActorResources("cpu", 0.0, 2.0, {"disk": 1.0}, {"zone": "x"})
    has = {"CPU": 4.0, "disk": 0.0}
    nodes = [Node(f"id{i}", f"n{i}", f"n{i}", has, has, {"zone": "y"}) for i in range(64)]
    nodes[40] = Node("id40", "n40", "n40", has, has, {"zone": "x"})
    nodes[50] = Node("id50", "n50", "n50", has | {"disk": 1.0}, has, {"zone": "y"})
    told = room_text(nodes, share)
    assert told.startswith(
        "n40 has 4 CPUs (4 free) and 0 disk (0 free): room for 0, n50 has label zone=y: room for 0, n0"
    )
    assert told.count("room for") == 8 and told.endswith(" and 56 more")
