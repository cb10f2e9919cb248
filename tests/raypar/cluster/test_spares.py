"""Spares take the place of actors that failed, and one that has died is replaced itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from raypar.cluster import actors as module
from raypar.cluster.actors import Actors, Home

LIVES = {"a": True, "b": True, "dead": False, "starting": None}


@pytest.fixture
def actors(monkeypatch):
    monkeypatch.setattr(module, "_lives", lambda handle: LIVES[handle])
    monkeypatch.setattr(module, "ray", SimpleNamespace(kill=lambda handle: None))
    monkeypatch.setattr(module, "is_alive", lambda node: node != "gone")

    def make(*spares, node="there"):
        homes = [Home(None, 0, node)]
        waiting = [(name, Home(None, bundle)) for bundle, name in enumerate(spares, 1)]
        create = lambda name, home: f"{name} in {home.bundle}"  # noqa: E731
        claim = lambda name: Home(None, 9)  # noqa: E731
        return Actors(["old"], None, False, "me", "cpu", create, claim, homes, waiting)

    return make


def test_a_spare_that_lives_is_taken_and_the_freed_home_gets_a_new_one(actors):
    team = actors("a", "b")
    assert (team.replace(0, "x"), team.homes[0].bundle) == ("a", 1)
    assert [name for name, _ in team.spares] == ["b", "x spare in 0"]


def test_a_spare_that_died_is_replaced_and_one_that_starts_is_kept(actors):
    team = actors("dead", "starting", "b")
    assert team.replace(0, "x") == "b"
    assert [name for name, _ in team.spares] == ["starting", "x spare in 0", "x spare in 1"]
    alone = actors("dead")
    assert alone.replace(0, "x") == "x in 0"
    assert [name for name, _ in alone.spares] == ["x spare in 1"]


def test_nothing_is_started_on_a_node_that_is_lost(actors):
    assert (team := actors("a", node="gone")).replace(0, "x") == "a"
    assert team.spares == []
    alone = actors("dead", node="gone")
    assert alone.replace(0, "x") == "x in 9"
    assert [name for name, _ in alone.spares] == ["x spare in 1"]
