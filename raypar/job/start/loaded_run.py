"""A run that is loaded on a job's actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypar.actors.mesh.world import World
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.sharding import Shard
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.actors.worker.build.plan import ActorPlan
from raypar.checkpoint.find import VerifiedCheckpoint
from raypar.cluster.calls.calls import Calls
from raypar.config.schedule import Programs
from raypar.job.start.lifetime import Lifetime
from raypar.schedules.schedule import Schedule

Holds = Sequence[Mapping[str, Shard]]  # by rank, the shard of each of its logical parameters

_LAUNCH_SECONDS = 60.0  # least time for actors to start, build and connect, even if the run's timeout is shorter


@dataclass(frozen=True)
class LoadedRun:
    """A run, and the actors of a job that take part in it.

    Attributes:
        run: The run.
        schedule: Lowered schedule of a training step, as the actors perform it.
        world: All ranks of the run.
        calls: Calls to these actors.
        skeleton: The model without its weights.
    """

    run: Run
    schedule: Schedule
    world: World
    calls: Calls
    skeleton: Skeleton

    @property
    def handles(self) -> Sequence[Any]:
        """Ray handles of the actors, by rank."""
        return self.calls.handles

    def start(
        self, plans: Sequence[ActorPlan], found: VerifiedCheckpoint | None, *, again: bool = False
    ) -> list[dict[str, Shard]]:
        """Make the actors build their parts of the run, and load a checkpoint if there is one.

        Args:
            plans: The actors' plans, by rank.
            found: The checkpoint; None for a new run.
            again: Whether all actors have answered before, so that one that does not is given up sooner.

        Returns:
            By rank, the shard that the rank holds of each of its logical parameters.
        """
        refs = [handle.start.remote(plan) for handle, plan in zip(self.handles, plans, strict=True)]
        launch = self._patient(again)
        holds = launch.gather(refs, "building their parts" if again else "the launch")
        if found is not None:
            self.load(found)
        return holds

    def load(self, found: VerifiedCheckpoint) -> None:
        """Make the actors load a checkpoint."""
        calls = self._patient()
        tensors = calls.shared(found.manifest.tensors)
        calls.all("load", str(found.path), tensors, what=f"loading {found.path.name}")

    def _patient(self, again: bool = False) -> Calls:
        """Return calls that give actors time to start, build and connect."""
        return Calls(self.handles, self.world, max(self.run.timeout, _LAUNCH_SECONDS), replaces=again)


def loaded_on(lifetime: Lifetime, run: Run, programs: Programs, skeleton: Skeleton) -> LoadedRun:
    """Return a run with the first actors of a job, as many as it needs, without calling them yet.

    Args:
        lifetime: The life of the job's actors.
        run: The run.
        programs: Its lowered schedules.
        skeleton: The model without its weights.

    Raises:
        JobError: The job is over.
    """
    world = world_of(run)
    calls = lifetime.calls_on(world, run.timeout, replaces=run.max_failures > 0)
    return LoadedRun(run, programs["train"], world, calls, skeleton)
