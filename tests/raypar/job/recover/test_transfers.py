"""Which snapshots are sent where: each node gets what its ranks need and lack, once, and all share in the work."""

from __future__ import annotations

from collections import Counter

import pytest

from raypar.actors.checkpoint.snapshot_address import SnapshotOwner
from raypar.job.recover.transfers import SnapshotTransfer, chosen_holders, has_all, transfers


def shares(count):
    return [SnapshotOwner(0, rank) for rank in range(count)]


def nodes_of(size, per_node):
    """The node of each rank, and the steps of which each has snapshots: 7 and 8, of all actors of its node."""
    places = [f"node {rank // per_node}" for rank in range(size)]
    on = {place: [SnapshotOwner(0, rank) for rank in range(size) if places[rank] == place] for place in places}
    return places, [dict.fromkeys(on[place], (7, 8)) for place in places]


def test_on_one_node_nothing_is_sent():
    everything = dict.fromkeys(shares(3), (4, 5))
    assert [*transfers(["here"] * 3, [everything] * 3, [shares(3)] * 3, 5)] == []


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_each_node_gets_each_share_that_it_lacks_once(nodes):
    """Every node has two actors, and both have the shares of both, and need all."""
    size = 2 * nodes
    places, steps = nodes_of(size, 2)
    sent = [*transfers(places, steps, [shares(size)] * size, 8)]
    assert sorted((one.share.rank, places[one.receiver]) for one in sent) == sorted(
        (of, f"node {node}") for of in range(size) for node in range(nodes) if of // 2 != node
    )
    assert all(8 in steps[one.giver][one.share] for one in sent)
    assert set(Counter(one.receiver for one in sent).values()) == {nodes - 1}, "both of a node receive as many"
    assert set(Counter(one.giver for one in sent).values()) == {nodes - 1}, "both of a node send as many"


def test_what_no_rank_of_a_node_needs_is_not_sent_there():
    places, steps = nodes_of(6, 2)
    needed = [[SnapshotOwner(0, of) for of in ranks] for ranks in ([0], [1], [0], [0, 5], [4, 1], [])]
    sent = [*transfers(places, steps, needed, 8)]
    assert sorted((one.share.rank, places[one.receiver]) for one in sent) == [
        (0, "node 1"),
        (1, "node 2"),
        (5, "node 1"),
    ]


@pytest.mark.parametrize("size", [64, 512])
def test_of_replicas_with_copies_of_one_state_each_other_node_gets_one_share(size):
    places, steps = nodes_of(size, 8)
    sent = [*transfers(places, steps, [shares(1)] * size, 8)]
    assert [one.share for one in sent] == shares(1) * (size // 8 - 1)
    assert {places[one.receiver] for one in sent} == {*places} - {"node 0"}
    given = Counter(one.giver for one in sent)
    assert max(given.values()) == -(-len(sent) // 8), "all of the node that has it send as many"


def test_another_step_is_of_no_use_and_who_has_no_rank_gives():
    """Rank 1 has come new to its node, and the actor that it replaces, number 2, is on one that is taken away."""
    steps = [{SnapshotOwner(0, 0): (5,)}, {SnapshotOwner(0, 1): (4,)}, {SnapshotOwner(0, 1): (5,)}]
    assert [*transfers(["a", "b"], steps, [shares(2)] * 2, 5)] == [
        SnapshotTransfer(SnapshotOwner(0, 1), 2, 0),
        SnapshotTransfer(SnapshotOwner(0, 0), 0, 1),
        SnapshotTransfer(SnapshotOwner(0, 1), 2, 1),
    ]


def test_who_has_no_rank_gives_nothing_that_one_with_a_rank_has():
    steps = [{SnapshotOwner(0, 0): (5,)}, {}, {SnapshotOwner(0, 0): (5,)}, {SnapshotOwner(0, 0): (5,)}]
    assert [*transfers(["a", "b"], steps, [shares(1)] * 2, 5)] == [SnapshotTransfer(SnapshotOwner(0, 0), 0, 1)]
    assert chosen_holders(steps, 2, shares(1), 5) == {0: shares(1)}


def test_actors_of_unknown_places_are_each_on_their_own():
    steps = [{SnapshotOwner(0, 0): (1,)}, {}, {}]
    found = transfers(["", "", ""], steps, [shares(1)] * 3, 1)
    assert [(one.giver, one.receiver) for one in found] == [(0, 1), (0, 2)]


def test_the_actors_of_a_node_are_asked_for_its_shares_in_turn():
    _, steps = nodes_of(8, 4)
    chosen = chosen_holders([*steps, {SnapshotOwner(0, 8): (8,)}], 8, shares(9), 8)
    assert Counter(share for of_one in chosen.values() for share in of_one) == Counter(shares(9))
    assert all(share in steps[actor] for actor, of_one in chosen.items() for share in of_one if actor < 8)
    assert {len(of_one) for of_one in chosen.values()} == {1}
    assert chosen[8] == [SnapshotOwner(0, 8)], "nobody with a rank has it"


def test_whether_all_have_all():
    both = dict.fromkeys(shares(2), (4, 5))
    assert has_all([both, both], shares(2), 5)
    assert not has_all([both, {SnapshotOwner(0, 0): (4, 5)}], shares(2), 5)
    assert not has_all([both, {**both, SnapshotOwner(0, 1): (4,)}], shares(2), 5)
    assert not has_all([both, {SnapshotOwner(0, 0): (5,), SnapshotOwner(1, 1): (5,)}], shares(2), 5)
