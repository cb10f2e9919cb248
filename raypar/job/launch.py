"""Launch a job: check the run first, then place its actors."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike

from raypar.actors.bounds import NotNegative
from raypar.actors.specs.injected_fault import InjectedFault
from raypar.actors.specs.precision import WITHOUT_FP8
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.checkpoint.find import VerifiedCheckpoint
from raypar.cluster.interrupts import answered
from raypar.cluster.lifecycle.ray_cluster import ROOM_SECONDS, Waits, start_actors
from raypar.cluster.nodes.nodes import living_nodes, without_folder
from raypar.cluster.placement.given_group import PlacementGroup
from raypar.config.arguments import checked_arguments
from raypar.config.run import reset_faults
from raypar.errors import ConfigError
from raypar.job.job import Job
from raypar.job.recover.chaos import injectable, never_happen
from raypar.job.start.before_launch import look_ahead
from raypar.job.start.conversion import convert_on_cluster
from raypar.job.start.resume import prepared
from raypar.job.start.run_folders import replaced, settled
from raypar.paths import AUTO, absolute
from raypar.reporting.progress import launching, on_screen
from raypar.reporting.record import Record
from raypar.reporting.summary import log_plan
from raypar.user_name import user_name

log = logging.getLogger(__name__)

_LONGEST_NAME = 40  # characters of a run folder's name that are part of its job's


@checked_arguments
def launch(
    run: Run,
    *,
    wait_for_nodes: NotNegative = 0.0,
    wait_for_room: NotNegative = ROOM_SECONDS,
    placement_group: PlacementGroup | None = None,
    resume: str | PathLike[str] | VerifiedCheckpoint | None = None,
    overwrite: bool = False,
    chaos: Sequence[InjectedFault] = (),
) -> Job:
    """Start a run's actors and build its model on them. Use the Job in a ``with`` block, or close it.

    Args:
        run: The run.
        wait_for_nodes: Seconds to wait for nodes: if the cluster is too small for the run, and later (max_failures) if
            one is lost without which the run can't go on. The autoscaler brings them, or they come back.
        wait_for_room: Seconds to wait for CPUs and GPUs that others have now; what is waited for is logged.
        placement_group: The placement group of Ray's in which the actors are to be, and which stays when they end; None
            for that of the task or actor that launches (as of a Tune trial), if it has room for them, else a new one.
        resume: Checkpoint to continue from, bitwise. For a run folder or a folder of checkpoints, the newest sound one.
            The mesh and the schedule may differ from the checkpoint's; the model, the kind of optimizer and the seed
            may not. None starts from new weights.
        overwrite: Replace a run that is in the run's folder, which then must hold nothing else. It is removed once the
            new run has begun.
        chaos: Faults that are injected on purpose; see ``rp.chaos``.

    Raises:
        ConfigError: The run has faults. The error lists all of them, and no actor was started.
        RoomError: The cluster has no room for the actors, or had none in time. No actor was started.
        JobError: The actors could not be started.
    """
    chosen = run.folder == AUTO
    waits = Waits(wait_for_nodes, wait_for_room)
    with answered():
        return launch_in(
            run, waits, resume, overwrite=overwrite, chaos=chaos, may_lack_folder=chosen, group=placement_group
        )


def launch_in(
    run: Run,
    waits: Waits,
    resume: str | PathLike[str] | VerifiedCheckpoint | None,
    *,
    overwrite: bool,
    chaos: Sequence[InjectedFault],
    may_lack_folder: bool,
    group: PlacementGroup | None = None,
) -> Job:
    """Launch a run, as ``launch``.

    Args:
        run: As for ``launch``, like the following ones.
        waits: How long to wait for nodes and for room.
        resume: Checkpoint to continue from.
        overwrite: Whether the run replaces one that is in its folder.
        chaos: Faults that are injected.
        may_lack_folder: Whether nodes may lack the run's folder: nobody has named it. Then this process alone writes
            there, and no checkpoint is saved.
        group: The placement group in which the actors are to be.
    """
    checked = prepared(run, resume, overwrite=overwrite, convert=convert_on_cluster)
    run = checked.run
    world = world_of(run)
    chaos, wrong = injectable(chaos, world, checked.programs["train"])
    ConfigError.raise_if(wrong)
    look_ahead(checked)
    for warning in never_happen(chaos, run, checked.taken):
        log.warning("%s", warning)
    from raypar.actors.worker.actor import RayparActor  # after the checks: it imports torch

    run = settled(run)
    with replaced(run.folder if overwrite else None), ExitStack() as undo:
        name, record = _name_of(run), Record(run)
        undo.callback(record.close)
        with on_screen():
            log_plan(run, checked.programs["train"], checked.skeleton, checked.taken)
        folder = None if run.folder is None else absolute(run.folder)
        seen = None if may_lack_folder else folder
        with launching(world.size):
            chosen = run.resources, run.shared_gpu, WITHOUT_FP8 if run.precision.compute == "fp8" else ()
            actors = start_actors(RayparActor, world, run.device, name, waits, run.spares, seen, group, *chosen)
            undo.callback(actors.end)
            if may_lack_folder and folder is not None and (blind := without_folder(living_nodes(), folder)):
                log.warning(
                    "node %s does not see %s: only this process writes there, and no checkpoint is saved; give a "
                    "--folder that all nodes share",
                    blind[0],
                    folder,
                )
                run = replace(run, folder=None)
            ConfigError.raise_if(reset_faults(run, actors.device))
            job = Job(checked._replace(run=run), actors, name, record, chaos)
        undo.pop_all()
        return job


def _name_of(run: Run) -> str:
    """Return the name of a job, with which its actors and its placement group begin in Ray's state and dashboard."""
    folder = "" if run.folder is None else absolute(run.folder).name[:_LONGEST_NAME]
    return "-".join(filter(None, ("raypar", user_name(), folder, uuid.uuid4().hex[:8])))
