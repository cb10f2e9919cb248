"""The plan of one actor: all that it needs to know about a run, as plain data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raypar.actors.mesh.world import World
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind, ProgramName
from raypar.schedules.schedule import Schedule


@dataclass(frozen=True)
class Plan:
    """The part of a run that concerns one actor.

    Attributes:
        run: The run. The paths of its data are absolute, and its schedule is only a name.
        name: A name that is unique for this job and generation. The names of the groups begin with it.
        rank: Rank of this actor in the world.
        programs: Lowered schedules by program name, in which only this actor's row is filled.
        device: Device that all actors of the run compute on.
    """

    run: Run
    name: str
    rank: int
    programs: Mapping[ProgramName, Schedule]
    device: DeviceKind

    @property
    def world(self) -> World:
        """All ranks of the run."""
        return World.of(self.run.mesh, self.run.data_parallel, self.run.servers, self.run.zero, self.run.offload)
