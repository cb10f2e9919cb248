"""A cluster without room: actors that are lost get no others until there is room again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from raypar.cluster.lifecycle.replacement_actors import ActorBundle


class FullCluster:
    """All CPUs of a cluster that are free or are given back, in the hands of nobody, until ``make_room``."""

    def __init__(self) -> None:
        cpus = int(ray.cluster_resources()["CPU"])
        self._groups = [placement_group([{"CPU": 1}]) for _ in range(cpus)]  # those that do not fit wait
        end = time.monotonic() + 30
        while ray.available_resources().get("CPU", 0) >= 1:
            assert time.monotonic() < end, "there is still room"
            time.sleep(0.05)

    def keep(self, home) -> None:
        """Take the place of a home that is given back; Ray might give it to whoever asks next."""
        if home.is_claimed:
            self._groups.append(home.group)

    def make_room(self) -> None:
        """Give the CPUs back."""
        while self._groups:
            remove_placement_group(self._groups.pop())


@contextmanager
def without_room(seconds: float = 0.3) -> Iterator[FullCluster]:
    """Within the block nothing starts in the home of an actor that is lost, as if its node were too, or elsewhere.

    Args:
        seconds: How long a run waits for room.
    """
    cluster = FullCluster()
    limits = {
        "raypar.cluster.lifecycle.replacement_actors._STARTED": 0.0,
        "raypar.cluster.lifecycle.replacement_actors._ROOM": seconds,
    }
    patches = [mock.patch(name, limit) for name, limit in limits.items()]
    patches.append(mock.patch.object(ActorBundle, "give_back", lambda home: cluster.keep(home)))
    for patch in patches:
        patch.start()
    try:
        yield cluster
    finally:
        cluster.make_room()
        for patch in patches:
            patch.stop()


def wait_for_actors(job, count: int, seconds: float = 120.0) -> None:
    """Wait until so many actors of a job are there, those that come too late for a recovery too."""
    end, actors = time.monotonic() + seconds, job._lifetime.actors
    while actors.present < count:
        assert time.monotonic() < end, f"{actors.present} of {count} actors after {seconds:g} s"
        ray.wait([vacancy.awaited for vacancy in actors.pending], timeout=0.2)
        actors.look()
