"""A run that is loaded on a job's actors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypar.actors.mesh.world import World
from raypar.actors.specs.run import Run
from raypar.cluster.calls import Calls
from raypar.config.skeleton import Skeleton
from raypar.schedules.schedule import Schedule


@dataclass(frozen=True)
class LoadedRun:
    """A run, and the actors of a job that take part in it.

    Attributes:
        run: The run.
        schedule: Lowered schedule of a training step, as the actors perform it.
        world: All ranks of the run.
        handles: Ray handles of the actors, by rank.
        calls: Calls to these actors.
        skeleton: The model without its weights.
    """

    run: Run
    schedule: Schedule
    world: World
    handles: Sequence[Any]
    calls: Calls
    skeleton: Skeleton
