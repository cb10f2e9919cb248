"""How much memory all actors of a run need: its workers, and its parameter servers or expert actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from raypar.actors.machine.this_machine import device_kind
from raypar.actors.mesh.world import World
from raypar.actors.specs.model import Layers
from raypar.planner.memory.activations import most_kept
from raypar.planner.memory.worker import (
    WORKING_OF,
    ActorMemory,
    element_bytes,
    offloaded_bytes,
    process_and_snapshots,
    saved_bytes,
    states_of,
    worker_memory,
)
from raypar.planner.sizes.sized_run import SizedRun
from raypar.schedules.timeline import Timeline


def server_memory(sized: SizedRun, process: int | None = None) -> list[ActorMemory]:
    """Estimate the memory of a parameter server of each pipeline rank; empty if the run has none.

    The arguments are those of ``worker_memory``.
    """
    run, world, counts, _ = sized
    if not world.servers:
        return []
    each, servers, found = element_bytes(run), world.servers, []
    for count, state in zip(counts.held, states_of(run, counts), strict=True):
        share, optimizer = -(-count // servers), each.state * -(-state // servers)
        saved = saved_bytes(each, share, optimizer)
        found.append(
            ActorMemory(
                each.weight * share,
                each.gradient * share,
                optimizer,
                0,
                **process_and_snapshots(run, saved, process),
            )
        )
    return found


def expert_memory(sized: SizedRun, timeline: Timeline, process: int | None = None) -> list[ActorMemory]:
    """Estimate the memory of an expert actor of each pipeline rank at an even load; empty if the run has none.

    What passes through its device if its experts are offloaded is left out. Arguments: see ``worker_memory``.
    """
    run, world, counts, _ = sized
    if (own := counts.apart) is None:
        return []
    each = element_bytes(run)
    kept = [None] * len(own.held) if isinstance(run.model, Layers) else most_kept(run, run.model, timeline, apart=True)
    stays, device, found = world.offload == "none", device_kind(run.device), []
    for count, state, rows in zip(own.held, states_of(run, own), kept, strict=True):
        weights, optimizer = each.weight * count, each.state * state + each.master * count
        saved = saved_bytes(each, count, optimizer)
        found.append(
            ActorMemory(
                weights=0 if world.offload == "parameters" else weights,
                gradients=each.gradient * count if stays else 0,
                optimizer=optimizer if stays else 0,
                activations=rows,
                working=round(WORKING_OF[device] * (rows or 0)),
                offloaded=offloaded_bytes(world, each, count, weights, optimizer),
                **process_and_snapshots(run, saved, process),
            )
        )
    return found


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


def actors_memory(sized: SizedRun, timeline: Timeline, process: int | None = None) -> ActorsMemory:
    """Estimate the memory of all actors of a run. The arguments are those of ``worker_memory``."""
    others = expert_memory(sized, timeline, process) or server_memory(sized, process)
    return ActorsMemory(worker_memory(sized, timeline, process), others)
