"""Which snapshots are sent where: every node gets what it lacks, once, and no actor has all of the work."""

from __future__ import annotations

from collections import Counter

import pytest

from raypar.actors.checkpoint.snapshot_address import Share
from raypar.recovery.transfers import Transfer, transfers


def shares(count):
    return [Share(0, rank) for rank in range(count)]


def test_on_one_node_nothing_is_sent():
    everything = dict.fromkeys(shares(3), (4, 5))
    assert [*transfers(["here"] * 3, [everything] * 3, shares(3), 5)] == []


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_each_node_gets_each_share_that_it_lacks_once(nodes):
    """Every node has two actors, and both have the shares of both."""
    size = 2 * nodes
    places = [f"node {rank // 2}" for rank in range(size)]
    steps = [{Share(0, of): (7, 8) for of in (rank // 2 * 2, rank // 2 * 2 + 1)} for rank in range(size)]
    sent = [*transfers(places, steps, shares(size), 8)]
    assert sorted((one.share.rank, places[one.receiver]) for one in sent) == sorted(
        (of, f"node {node}") for of in range(size) for node in range(nodes) if of // 2 != node
    )
    assert all(8 in steps[one.giver][one.share] for one in sent)
    assert set(Counter(one.receiver for one in sent).values()) == {nodes - 1}, "both of a node receive as many"
    assert set(Counter(one.giver for one in sent).values()) == {nodes - 1}, "both of a node send as many"


def test_another_step_is_of_no_use_and_who_has_no_rank_gives():
    """Rank 1 has come new to its node, and the actor that it replaces, number 2, is on one that is taken away."""
    steps = [{Share(0, 0): (5,)}, {Share(0, 1): (4,)}, {Share(0, 1): (5,)}]
    assert [*transfers(["a", "b"], steps, shares(2), 5)] == [
        Transfer(Share(0, 0), 0, 1),
        Transfer(Share(0, 1), 2, 0),
        Transfer(Share(0, 1), 2, 1),
    ]


def test_actors_of_unknown_places_are_each_on_their_own():
    steps = [{Share(0, 0): (1,)}, {}, {}]
    assert [(one.giver, one.receiver) for one in transfers(["", "", ""], steps, shares(1), 1)] == [(0, 1), (0, 2)]
