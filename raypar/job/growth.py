"""Let a run that goes on with fewer replicas have more again, between two steps."""

from __future__ import annotations

import logging

from raypar.actors.errors import CheckpointError
from raypar.actors.specs.run import Run
from raypar.checkpoint.background_save import Saver
from raypar.checkpoint.resume import find
from raypar.job.rebalance import put_aside
from raypar.job.starter import Starter

log = logging.getLogger(__name__)


def grown(starter: Starter, saver: Saver, run: Run, step: int) -> int:
    """Go on with more replicas from a step: from snapshots, or else from a checkpoint that is saved for it.

    Args:
        starter: Starts the run again.
        saver: Saves checkpoints; nothing is under way.
        run: The run.
        step: Number of steps taken.

    Returns:
        The number of steps taken that the run goes on after.

    Raises:
        JobError: It failed; the run can be recovered.
    """
    if run.snapshot_every:
        return starter.grow(step)
    with put_aside(run) as folder:
        try:
            found = find(saver.save(folder, step, run.keep_last))
        except CheckpointError as error:
            log.warning("the run does not grow, as no checkpoint was saved:\n%s", error)
            return step
        return starter.grow(step, found)
