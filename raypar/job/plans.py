"""From a run to what each of its actors is told."""

from __future__ import annotations

from dataclasses import replace

from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind
from raypar.actors.worker.plan import Plan
from raypar.config.run import rooted, world_of
from raypar.config.schedule import Programs, only_row


def plans_of(run: Run, programs: Programs, name: str, device: DeviceKind = "cpu") -> list[Plan]:
    """The plan of every rank; ``name`` is unique to job and generation, ``device`` what all of them compute on."""
    world = world_of(run)
    own = [{key: only_row(schedule, pp) for key, schedule in programs.items()} for pp in range(run.mesh.pp)]
    return [
        Plan(
            run=shipped(run),
            name=name,
            rank=rank,
            programs=own[world.pp(rank)],
            device=device,
        )
        for rank in range(world.size)
    ]


def shipped(run: Run) -> Run:
    """The run as its actors get it: the data's paths are absolute; of a Schedule, which has the rows of all ranks, only
    the name goes along."""
    schedule = run.schedule if isinstance(run.schedule, str) else run.schedule.name
    return replace(run, schedule=schedule, data=rooted(run.data))
