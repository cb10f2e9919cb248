"""Everything that one actor is told about a run. Plain data; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raypar.actors.mesh.world import World
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind, ProgramName
from raypar.schedules.schedule import Schedule


@dataclass(frozen=True)
class Plan:
    """A run as one actor sees it.

    run       the run; its data's paths are absolute, and its schedule is only a name
    name      unique to job and generation; the names of its groups begin with it
    rank      this actor's rank in the world
    programs  the schedules by name, as they are performed; of their rows only this actor's is filled
    device    what every actor of the run computes on
    """

    run: Run
    name: str
    rank: int
    programs: Mapping[ProgramName, Schedule]
    device: DeviceKind

    @property
    def world(self) -> World:
        """All ranks of the run."""
        return World.of(self.run.mesh, self.run.data_parallel, self.run.servers, self.run.zero)
