"""Launches on actors that are there already: what is tested is what is launched, and not how a process starts.

An actor's process takes two seconds of a core to start. A job's actors forget its run when it ends, as at a reset, and
are the next job's.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import ray

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import World
from raypar.cluster.lifecycle.actors import Actors
from raypar.cluster.lifecycle.ray_cluster import USUAL_WAITS, start_actors
from raypar.cluster.lifecycle.replacement_actors import succeeded


class Pool:
    """Actors that no job has, each with its home; it grows with the largest world.

    Attributes:
        idle: The actors.
        standing: Closes the job that stands ready for tests, whose actors are given back before others are started.
    """

    def __init__(self):
        self.idle, self._started, self.standing = [], [], lambda: None

    def start(self, hosted, world, device, job, waits=USUAL_WAITS, spares=0, *of_cluster):
        """Instead of ``start_actors``."""
        size = world.size + spares
        if size > len(self.idle):
            self.standing()
        missing = size - len(self.idle)
        if missing > 0:
            new = start_actors(hosted, World(Mesh(dp=missing)), device, f"{job} kept", waits)
            self._started.append(new)
            kept = [replace(bundle, in_use=None) for bundle in new.bundles]  # they are the pool's, not a job's
            self.idle += zip(new.handles, kept, strict=True)
        first = self._started[0]
        taken, self.idle = self.idle[:size], self.idle[size:]
        kept = {"driver": first.driver, "device": first.device}
        kept |= {"create": first.create, "claim": first.claim, "bundles": [bundle for _, bundle in taken]}
        kept |= {"wait_for_nodes": waits.nodes}
        return Lent(handles=[handle for handle, _ in taken], owns_cluster=False, pool=self, **kept)

    @contextmanager
    def serving(self):
        """Within it whatever launches a run takes its actors from here."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("raypar.job.launch.start_actors", self.start)
            yield

    def close(self):
        for actors in self._started:
            actors.end()


@dataclass(kw_only=True)
class Lent(Actors):
    """A job's actors, which it gives back at its end."""

    pool: Pool

    def end(self, *, is_lost=False, has_failed=False):
        kept = [
            replace(bundle, is_draining=False) for bundle in self.bundles
        ]  # no node is taken away but in a test's eyes
        there = [one for one in zip(self.handles, kept, strict=True) if one[0] is not None]
        self.handles, self.bundles = [], []
        while self.pending:
            self.pending.pop().close()
        left = [handle.leave.remote() for handle, _ in there]
        ray.wait(left, num_returns=len(left), timeout=30)
        for ref, one in zip(left, there, strict=True):
            if succeeded(ref):
                self.pool.idle.append(one)
            else:
                ray.kill(one[0])
