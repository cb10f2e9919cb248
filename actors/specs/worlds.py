"""The world of a run: its ranks."""

from __future__ import annotations

from raypar.actors.mesh.world import World
from raypar.actors.specs.run import Run


def world_of(run: Run) -> World:
    """Return the world of a run: all its workers, and its parameter servers if it has any."""
    return World.of(run.mesh, run.data_parallel, run.servers, run.zero, run.offload)
