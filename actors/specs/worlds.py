"""The world of a run: its ranks."""

from __future__ import annotations

from dataclasses import replace

from raypar.actors.mesh.world import World, Zero
from raypar.actors.specs.run import Run

CUT_LEVELS: frozenset[Zero] = frozenset({1, 2, 3})
"""the ZeRO levels at which replicas divide the elements of every weight, and not the weights"""


def world_of(run: Run) -> World:
    """Return the world of a run: all its workers, and its parameter servers if it has any."""
    world = World.of(run.mesh, run.data_parallel, run.servers, run.zero, run.offload)
    return replace(world, cuts=world.zero in CUT_LEVELS)
