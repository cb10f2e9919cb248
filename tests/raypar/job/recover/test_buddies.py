"""Who keeps a copy of whose snapshots, and how often copies are made."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

import raypar as rp
from raypar.actors.checkpoint.snapshot_address import SnapshotOwner
from raypar.actors.machine.process_identity import ProcessIdentity
from raypar.actors.specs.results import Copied
from raypar.config.conflicts.parallel import idle_fields
from raypar.job.recover.buddies import CopyPace, buddies_of, failure_domains
from raypar.job.recover.snapshots import Snapshots


@pytest.mark.parametrize(
    ("places", "buddies"),
    [
        ("a", (None,)),
        ("aaaa", (None,) * 4),
        ("ab", (1, 0)),
        ("aabb", (2, 3, 0, 1)),
        ("abab", (1, 0, 3, 2)),
        ("abc", (1, 2, 0)),
        ("aaab", (3, 3, 3, 2)),
        ("a.", (None, None)),
        ("a.b", (2, None, 0)),
    ],
)
def test_a_buddy_is_on_another_node(places, buddies):
    """A letter is a node, and a dot an actor of whose node nothing was heard."""
    assert buddies_of([place.strip(".") for place in places]) == buddies


@pytest.mark.parametrize("sizes", [(2, 2), (4, 4, 4), (1, 2, 3), (8, 1), (3, 1, 1), (5, 3, 2, 2), (1,) * 7], ids=str)
def test_copies_are_shared_out_evenly(sizes):
    places = [f"node {node}" for node, size in enumerate(sizes) for _ in range(size)]
    buddies = buddies_of(places)
    kept = Counter(buddies)
    assert all(places[rank] != places[buddy] for rank, buddy in enumerate(buddies))
    if 2 * max(sizes) <= len(places):
        assert sorted(buddies) == list(range(len(places))), "one each"
    else:
        others = [kept[rank] for rank, place in enumerate(places) if place != f"node {sizes.index(max(sizes))}"]
        assert max(others) - min(others) <= 1


@pytest.mark.parametrize(
    ("processes", "buddies"),
    [
        (("m1", "m1"), (None, None)),
        (("m1", "m2"), (1, 0)),  # two containers of one machine
        (("m1", "m2", "n1", "n2"), (2, 3, 0, 1)),
        (("m1", "m2", "n1"), (2, 2, 1)),
        (("m1", "..", "m2"), (2, None, 0)),
    ],
)
def test_a_buddy_is_on_another_machine_and_in_another_container_if_there_is_only_one(processes, buddies):
    """The letter is a machine, and the number a PID namespace on it; of dots nothing was heard."""
    found = [ProcessIdentity(*[] if one == ".." else [one[0], 1, 0, 5, int(one[1])]) for one in processes]
    assert buddies_of(failure_domains(found)) == buddies


def test_a_step_whose_shares_are_partly_copies_is_one_to_go_back_to():
    snapshots = Snapshots()
    snapshots.source = (SnapshotOwner(0, 0), SnapshotOwner(0, 1))
    own, copies, others = (
        {SnapshotOwner(0, 0): (10, 13, 14)},
        {SnapshotOwner(0, 1): (8, 10)},
        {SnapshotOwner(1, 1): (14,)},
    )
    assert snapshots.common([{**own, **copies}, others], 14) == 10
    assert snapshots.common([own, copies], 9) is None, "of step 8 one is missing"
    assert snapshots.common([own, others], 14) is None, "that is of another layout"
    snapshots.close()


def results(waited=0.0, lost=""):
    return [SimpleNamespace(copied=Copied()), SimpleNamespace(copied=Copied(waited, lost))]


def test_copies_have_until_the_step_before_the_next_and_are_whole_multiples_of_snapshots():
    run = rp.Run(max_failures=1)
    assert [CopyPace(run).within(step) for step in range(8, 11)] == [0, 9, 0]
    assert [CopyPace(replace(run, buddy_every=1)).within(step) for step in range(3)] == [1, 1, 1]
    assert [CopyPace(replace(run, buddy_every=5, snapshot_every=3)).within(step) for step in range(4, 7)] == [0, 5, 0]


def test_steps_that_wait_make_copies_less_frequent_and_one_that_is_lost_is_told_once(caplog):
    pace = CopyPace(rp.Run(max_failures=1, buddy_every=4))
    labels = ["pp=0", "pp=1"]
    with caplog.at_level(logging.WARNING):
        pace.learn(results(), 20.0, labels)
        pace.learn(results(waited=1.1), 10.0, labels)
        assert (pace.every, caplog.messages) == (4, []), "3.7 % of the time"
        pace.learn(results(waited=0.9), 6.0, labels)
        assert pace.every == 8
        pace.learn(results(waited=0.9), 1.0, labels)
        assert pace.every == 8, "less than a second"
        pace.learn(results(lost="Connection refused"), 1.0, labels)
        pace.learn(results(lost="Connection refused"), 1.0, labels)
    slow, lost = caplog.messages
    assert slow.startswith("steps waited 2.0 s of 36.0 s for copies of snapshots on other nodes, which are made after ")
    assert slow.endswith("every 8 steps from now on: set buddy_every to that, or to 0 for no copies")
    assert lost.startswith("the snapshots of pp=1 are copied to another node no more (Connection refused)")


def test_what_has_no_effect_is_told():
    runs = [rp.Run(max_failures=0 if every else 1, snapshot_every=every, buddy_every=3) for every in (1, 0)]
    assert not [*idle_fields(rp.Run(max_failures=1, snapshot_every=0))]
    assert [told for run in runs for told in idle_fields(run)] == [
        "buddy_every 3 has no effect without max_failures: give max_failures, or leave it out",
        "buddy_every 3 has no effect with snapshot_every 0: give snapshot_every, or leave it out",
    ]
