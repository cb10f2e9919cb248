"""Starting a job: everything that can be wrong is said first, then its actors are placed."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

from raypar.actors.specs.run import Run
from raypar.checkpoint.find import Found
from raypar.checkpoint.resume import prepared
from raypar.cluster.ray_cluster import demand_shippable, start_actors
from raypar.config.run import world_of
from raypar.job.job import Job
from raypar.reporting.record import Record

log = logging.getLogger(__name__)


def launch(run: Run, *, wait_for_nodes: float = 0.0, resume: str | Path | Found | None = None) -> Job:
    """Start a run's actors and build its model on them; use the Job in a ``with``, or close it.

    A cluster that has too little is given ``wait_for_nodes`` seconds for its autoscaler to bring more. ``resume`` is a
    checkpoint, or a folder of them or of a run, of which the newest sound one counts: the job goes on from there,
    bitwise. Another mesh or schedule will do; another model, kind of optimizer or seed will not.

    Raises ConfigError with everything that is wrong with the run, before any actor starts.
    """
    programs, skeleton, found = prepared(run, resume)
    from raypar.actors.worker.actor import Hosted

    demand_shippable(run.model, run.data)
    world = world_of(run)
    name, record = f"raypar-{uuid.uuid4().hex[:8]}", Record(run)
    try:
        log.info("starting %d actors", world.size)
        actors = start_actors(Hosted, world, run.device, name, wait_for_nodes)
        try:
            return Job(run, programs, skeleton, actors, name, record, found)
        except BaseException:
            actors.end()
            raise
    except BaseException:
        record.close()
        raise
