"""Create the plan of every actor from a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.injected_fault import InjectedFault
from raypar.actors.specs.model import Layers, Transformer
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind
from raypar.actors.specs.worlds import world_of
from raypar.actors.worker.build.plan import ActorPlan
from raypar.config.absolute_paths import rooted
from raypar.config.schedule import Programs, only_row
from raypar.paths import PROFILES, absolute


def plans_of(
    run: Run,
    programs: Programs,
    job: str,
    generation: int = 1,
    device: DeviceKind = "cpu",
    faults: Sequence[InjectedFault] = (),
    layout: int = 0,
    *,
    is_loaded: bool = False,
) -> list[ActorPlan]:
    """Create the plan of every rank.

    Args:
        run: The run.
        programs: Its lowered schedules.
        job: A name that is unique for this job.
        generation: How often its actors have joined groups, this time included.
        device: Device that all actors compute on.
        faults: Faults that are injected on purpose.
        layout: Number of the run's layout; see ``ActorPlan``.
        is_loaded: Whether all trained weights are replaced before the first step.

    Returns:
        The plans by rank.
    """
    world = world_of(run)
    profiles = None if run.profile is None or run.folder is None else str(absolute(run.folder) / PROFILES)
    shared = run_for_actors(run)
    alone = replace(shared, zero=0)  # an expert actor shares its weights with nobody
    own = [
        {key: only_row(schedule, row) for key, schedule in programs.items()}
        for row in range(programs["train"].num_ranks)
    ]
    return [
        ActorPlan(
            run=alone if world.is_expert(rank) else shared,
            job=job,
            generation=generation,
            rank=rank,
            programs=own[world.row(rank)],
            device=device,
            faults=tuple(fault for fault in faults if fault.actor == world.label(rank)),
            layout=layout,
            is_loaded=is_loaded,
            profiles=profiles,
        )
        for rank in range(world.size)
    ]


def begun(run: Run, skeleton: Skeleton) -> Run:
    """Return a run that goes on from a checkpoint: it needs no folder with the weights that it began with.

    With adapters it needs the model's, and own layers with frozen weights need theirs, because a checkpoint has only
    what learns.

    Args:
        run: The run.
        skeleton: The skeleton of its model.
    """
    if isinstance(run.model, Transformer) and run.model.lora is not None:
        return replace(run, model=replace(run.model, lora=replace(run.model.lora, hf=None)))
    if run.model.hf is None or (isinstance(run.model, Layers) and skeleton.has_frozen):
        return run
    return replace(run, model=replace(run.model, hf=None))


def run_for_actors(run: Run) -> Run:
    """Return the run that the actors get.

    Paths are absolute. A Schedule is replaced by its name, because actors get their own rows separately.
    """
    schedule = run.schedule if isinstance(run.schedule, str) else run.schedule.name
    return replace(rooted(run), schedule=schedule)
