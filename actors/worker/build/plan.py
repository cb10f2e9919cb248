"""The plan of one actor: its part of a run, as plain data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raypar.actors.mesh.world import World
from raypar.actors.specs.injected_fault import InjectedFault
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind, ProgramName
from raypar.actors.specs.worlds import world_of
from raypar.schedules.schedule import Schedule


@dataclass(frozen=True)
class ActorPlan:
    """The part of a run that concerns one actor.

    Attributes:
        run: The run. The paths of its data are absolute, and its schedule is only a name.
        job: A name that is unique for this job.
        generation: Number of times that the job's actors have joined groups, including this time.
        rank: Rank of this actor in the world.
        programs: Lowered schedules by program name, in which only this actor's row is filled.
        device: Kind of device on which all actors of the run compute.
        faults: Faults of this actor that are injected on purpose.
        layout: Number of the run's layout, which changes when the run goes on with other ranks.
        is_loaded: Whether all trained weights are replaced before the first step, from a checkpoint, say.
        profiles: Folder into which actors write the profiles of the steps ``run.profile``; None if it has none.
    """

    run: Run
    job: str
    generation: int
    rank: int
    programs: Mapping[ProgramName, Schedule]
    device: DeviceKind
    faults: tuple[InjectedFault, ...] = ()
    layout: int = 0
    is_loaded: bool = False
    profiles: str | None = None

    @property
    def name(self) -> str:
        """A name that is unique for this job and generation. The names of the groups begin with it."""
        return f"{self.job}@{self.generation}"

    @property
    def world(self) -> World:
        """All ranks of the run."""
        return world_of(self.run)
