"""Places without an actor: looked for a home where the old one is lost, and late where there is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from raypar.cluster.lifecycle import replacement_actors as vacancies
from raypar.cluster.lifecycle.actors import Actors
from raypar.cluster.lifecycle.replacement_actors import ActorBundle, PendingActor


class Cluster:
    """Ray as far as a vacancy asks for it: nothing comes before the test says so. A ref is a number."""

    def __init__(self):
        self.now, self.refs, self.come, self.died = 0.0, 0, set(), set()
        self.killed, self.removed, self.created = [], [], []

    def ref(self):
        self.refs += 1
        return self.refs

    def create(self, name, home):
        handle = SimpleNamespace(progress=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.ref)))
        self.created.append((name, home))
        return handle

    def claim(self, name):
        return SimpleNamespace(ready=self.ref)

    def wait(self, refs, timeout=None, num_returns=1):
        return [ref for ref in refs if ref in self.come], []

    def get(self, ref):
        if ref in self.died:
            raise RayActorError

    def kill(self, handle):
        self.killed.append(handle)


@pytest.fixture
def fake(monkeypatch):
    cluster = Cluster()
    monkeypatch.setattr(vacancies, "ray", cluster)
    monkeypatch.setattr(vacancies, "remove_placement_group", cluster.removed.append)
    monkeypatch.setattr(vacancies, "placement_group_table", lambda group: {"bundles_to_node_id": {0: "new"}})
    monkeypatch.setattr(vacancies, "time", SimpleNamespace(monotonic=lambda: cluster.now))
    return cluster


HOME = ActorBundle("group", 1, "node")


def test_an_actor_starts_in_the_home_that_is_free(fake):
    vacancy = PendingActor("a", HOME, fake.create, fake.claim)
    assert vacancy.look() is None and vacancy.has_room
    fake.come.add(vacancy.awaited)
    _, home = vacancy.look()
    assert (home, fake.created, fake.removed) == (HOME, [("a 1", HOME)], [])


def test_where_nothing_is_heard_of_it_another_home_is_looked_for(fake):
    vacancy = PendingActor("a", HOME, fake.create, fake.claim)
    fake.now = 31.0
    assert vacancy.look() is None and not vacancy.has_room and len(fake.killed) == 1
    fake.now = 40.0
    assert not vacancy.is_late()
    fake.now = 42.0
    assert vacancy.is_late() and vacancy.look() is None
    assert vacancy.is_late(5.0) and not vacancy.is_late(60.0), "as long as nodes are waited for"
    fake.now = 92.0
    assert vacancy.is_late(60.0)
    fake.now = 9999.0
    fake.come.add(vacancy.awaited)
    assert vacancy.look() is None and vacancy.has_room
    fake.come.add(vacancy.awaited)
    _, home = vacancy.look()
    assert (home.bundle, home.node, home.is_claimed) == (0, "new", True)


def test_one_that_dies_before_it_answers_is_tried_again_and_late_at_last(fake):
    vacancy = PendingActor("a", None, fake.create, fake.claim)
    while not vacancy.is_late():
        fake.come.add(vacancy.awaited)
        if vacancy.has_room:
            fake.died.add(vacancy.awaited)
        vacancy.look()
        fake.now += 1.0
        assert fake.now < 100
    assert len(fake.removed) == len(fake.killed) > 1, "their claims are given back"
    vacancy.close()


def test_actors_that_come_have_no_rank_until_they_are_seated(fake, monkeypatch):
    monkeypatch.setattr("raypar.cluster.lifecycle.actors.ray", fake)
    monkeypatch.setattr("raypar.cluster.lifecycle.actors.is_lasting", lambda node: True)
    homes = [ActorBundle("group", bundle, "node") for bundle in range(3)]
    actors = Actors(["a", "b", "c"], False, "me", "cpu", fake.create, fake.claim, homes)
    actors.replace_actor(1, "another")
    assert (actors.handles, actors.present, fake.killed) == (["a", None, "c"], 2, ["b"])
    actors.look()
    assert actors.present == 2
    fake.come.add(actors.pending[0].awaited)
    actors.wait_for_actors(3)
    assert (actors.present, actors.pending, actors.bundles[3]) == (3, [], homes[1])
    new = actors.handles[3]
    actors.assign_ranks([0, 3])
    assert actors.handles == ["a", new, "c"] and actors.bundles == [homes[0], homes[1], homes[2]]


@pytest.mark.parametrize(("alive", "pinned", "stays"), [(True, "n", True), (False, "n", False), (False, "", True)])
def test_who_replaces_an_actor_of_a_lost_node_goes_wherever_there_is_room(fake, monkeypatch, alive, pinned, stays):
    """A home on a node would wait for it forever; one in a group of others moves with that."""
    monkeypatch.setattr("raypar.cluster.lifecycle.actors.ray", fake)
    monkeypatch.setattr("raypar.cluster.lifecycle.actors.is_lasting", lambda node: alive)
    old = ActorBundle("group", 0, pinned)
    actors = Actors(["dead"], False, "me", "cpu", fake.create, fake.claim, [old])
    actors.replace_actor(0, "a")
    assert [home for _, home in fake.created] == [old] * stays and actors.pending[0].has_room == stays
    assert not fake.removed, "it is one of the job's bundles"


def test_a_home_that_was_claimed_is_given_back_with_its_node(fake, monkeypatch):
    """Ray would move it to the next node with room, and keep that for nobody."""
    monkeypatch.setattr("raypar.cluster.lifecycle.actors.ray", fake)
    monkeypatch.setattr("raypar.cluster.lifecycle.actors.is_lasting", lambda node: node != "gone")
    homes = [ActorBundle("one", 0, "gone", {0}), ActorBundle("two", 0, "there", {0})]
    actors = Actors(["a", "b"], False, "me", "cpu", fake.create, fake.claim, homes)
    actors.replace_actor(0, "x")
    assert fake.removed == ["one"] and not actors.pending[0].has_room
    actors.replace_actor(1, "x")
    assert fake.removed == ["one"] and actors.pending[1].has_room
    fake.now = 31.0
    actors.look()
    assert fake.removed == ["one", "two"] and not actors.pending[1].has_room


def test_a_spare_that_died_is_replaced_and_one_that_starts_is_kept(fake, monkeypatch):
    monkeypatch.setattr("raypar.cluster.lifecycle.actors.ray", fake)
    monkeypatch.setattr("raypar.cluster.lifecycle.actors.is_lasting", lambda node: True)
    alive, dead, starting = [fake.create(name, None) for name in "bcd"]
    homes = [ActorBundle("group", bundle, "node") for bundle in range(4)]
    actors = Actors(["a", alive, dead, starting], False, "me", "cpu", fake.create, fake.claim, homes)
    fake.come |= {1, 2}  # they have answered, the second by an error
    fake.died.add(2)
    actors.demand_answers(1, "spare")
    assert (actors.handles, actors.present, fake.killed) == (["a", alive, None, None], 2, [dead])
    assert fake.created[3:] == [("spare 1 1", homes[2])], "the home of the dead one"
    fake.come.add(actors.pending[1].awaited)
    actors.look()
    assert actors.handles[4:] == [starting] and actors.bundles[4:] == [homes[3]]
