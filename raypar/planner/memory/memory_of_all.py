"""How much memory all actors of a run need: its workers, and its parameter servers or expert actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from raypar.actors.mesh.world import World
from raypar.actors.specs.run import Run
from raypar.planner.memory.server_and_expert_memory import others_memory
from raypar.planner.memory.worker import ActorMemory, ParameterCounts, worker_memory
from raypar.schedules.timeline import Timeline


class ActorsMemory(NamedTuple):
    """The memory of a run's actors, one of each kind by pipeline rank.

    Attributes:
        workers: Of a worker.
        others: Of a parameter server or an expert actor; empty if the run has only workers.
    """

    workers: Sequence[ActorMemory]
    others: Sequence[ActorMemory]

    def in_all(self, world: World, of: Callable[[ActorMemory], int]) -> int:
        """Add up a kind of memory over all actors of a run with these ranks, in bytes."""
        held = sum(len(world.replicas_of(pp)) * of(memory) for pp, memory in enumerate(self.workers))
        return held + sum(map(of, self.others)) * (world.servers + world.mesh.expert_actors)


def actors_memory(
    run: Run, world: World, counts: ParameterCounts, timeline: Timeline, process: int | None = None
) -> ActorsMemory:
    """Estimate the memory of all actors of a run. The arguments are those of ``worker_memory``."""
    return ActorsMemory(
        workers=worker_memory(run, world, counts, timeline, process),
        others=others_memory(run, world, counts, timeline, process),
    )
