"""Actors are released as far as Ray answers, and what it does not answer masks no error of the run."""

from __future__ import annotations

import logging
import os
import signal
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import World
from raypar.cluster.lifecycle import actors as actors_module
from raypar.cluster.lifecycle import claims, ray_cluster
from raypar.cluster.lifecycle.actors import Actors
from raypar.cluster.lifecycle.replacement_actors import ActorBundle
from raypar.cluster.placement.placement import Node
from raypar.errors import ConfigError


def fails(*_):
    raise GetTimeoutError("Failed to remove placement group within timeout")


@pytest.mark.parametrize("which", ["kill", "remove_placement_group"])
@pytest.mark.parametrize("owns", [False, True])
def test_a_ray_that_does_not_answer_is_left_all_the_same(monkeypatch, caplog, which, owns):
    called = []
    ray = SimpleNamespace(
        kill=fails if which == "kill" else lambda handle: called.append(handle),
        is_initialized=lambda: True,
    )
    monkeypatch.setattr(actors_module, "ray", ray)
    monkeypatch.setattr(actors_module, "disconnect", lambda **_: called.append("shutdown"))
    monkeypatch.setattr(actors_module, "driver_id", lambda: "me")
    monkeypatch.setattr(actors_module, "remove_placement_group", fails if which != "kill" else called.append)
    actors = Actors(
        ["a", "b"], owns, "me", "cpu", bundles=[ActorBundle("group", bundle, "n", {0, 1}) for bundle in range(2)]
    )
    with caplog.at_level(logging.WARNING, "raypar"):
        actors.end()
    assert called == (["group"] if which == "kill" else ["a", "b"]) + ["shutdown"] * owns
    assert "Ray did not release everything" in caplog.text and "within timeout" in caplog.text
    actors.end()
    assert called.count("shutdown") == owns


def test_a_ray_that_does_not_answer_is_asked_once_to_remove_placement_groups(monkeypatch, caplog):
    asked = []

    def remove(group):
        asked.append(group)
        fails()

    ray = SimpleNamespace(kill=lambda _: None, is_initialized=lambda: True)
    monkeypatch.setattr(actors_module, "ray", ray)
    monkeypatch.setattr(actors_module, "driver_id", lambda: "me")
    monkeypatch.setattr(actors_module, "remove_placement_group", remove)
    kept = []
    monkeypatch.setattr(actors_module, "disconnect", lambda *, keeps_logs: kept.append(keeps_logs))
    homes = [ActorBundle(one, 0, "n", {0}) for one in "xy"]
    for changes in ({}, {"has_failed": True}):
        asked.clear()
        Actors(["a", "b"], True, "me", "cpu", bundles=homes).end(**changes)
        assert asked == ["x"]
    replaced = Actors(["a"], True, "me", "cpu", bundles=homes[:1], _num_replaced=1)
    replaced.end()
    assert kept == [False, True, True], "logs of a failure are kept, also of one that the run has survived"


def test_a_claim_that_ctrl_c_comes_upon_is_given_back(monkeypatch):
    removed = []

    def claims_one(*_, name, **__):
        os.kill(os.getpid(), signal.SIGINT) if name == "job pp=0" else None
        return name

    monkeypatch.setattr(ray_cluster, "ray", SimpleNamespace(is_initialized=lambda: True, shutdown=lambda: None))
    monkeypatch.setattr(ray_cluster, "_connect", lambda: False)
    monkeypatch.setattr(ray_cluster, "get_current_placement_group", lambda: None)
    room = {"CPU": 4.0}
    monkeypatch.setattr(ray_cluster, "living_nodes", lambda: [Node("n", "host", "10.0.0.1", room, room)])
    monkeypatch.setattr(claims, "placement_group", claims_one)
    monkeypatch.setattr(claims, "remove_placement_group", removed.append)
    with pytest.raises(KeyboardInterrupt):
        ray_cluster.start_actors(object, World(Mesh(pp=2)), "cpu", "job")
    assert removed == ["job pp=1", "job pp=0"]


def test_too_many_actors_start_no_ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("raypar.actors.machine.this_machine.num_cores", lambda: 2)
    monkeypatch.setattr(ray_cluster, "ray", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setattr(ray_cluster, "_connect", None)  # nobody may call it
    with pytest.raises(ConfigError, match="17 actors are more than the 16 that this machine of 2 cores takes"):
        ray_cluster.start_actors(object, World(Mesh(pp=17)), "cpu", "job")
