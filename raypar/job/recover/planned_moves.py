"""Changes between two steps: go on with other actors, or go back before a step that is not finite."""

from __future__ import annotations

import logging

from raypar.actors.errors import CheckpointError, NonFiniteError
from raypar.actors.specs.run import Run
from raypar.checkpoint.find import newest
from raypar.errors import PreemptedError, RayLostError
from raypar.job.recover.background_save import Saver
from raypar.job.recover.restarts import Restarts
from raypar.job.recover.snapshots import takes_snapshots
from raypar.job.start.loaded_run import LoadedRun
from raypar.job.start.resume import find
from raypar.job.start.run_folders import put_aside
from raypar.paths import CHECKPOINTS, absolute, checkpoints_in

log = logging.getLogger(__name__)


def rearranged(starter: Restarts, saver: Saver, run: Run, step: int) -> int:
    """Go on with more replicas, or away from nodes that are taken away: from snapshots, or from a new checkpoint.

    Args:
        starter: Starts the run again.
        saver: Saves checkpoints; nothing is under way.
        run: The run.
        step: Number of steps taken.

    Returns:
        The number of steps taken that the run goes on after.

    Raises:
        PreemptedError: It can't go on, as nodes are taken away. It was saved.
        RayLostError: It can't go on without Ray's control server. It was saved.
        JobError: It failed; the run can be recovered.
    """
    if why := starter.why_lost():
        raise RayLostError(f"{why}: {_saved(saver, run, step)}")
    if why := starter.why_end():
        raise PreemptedError(f"{why}: {_saved(saver, run, step)}")
    if takes_snapshots(run):
        return starter.rearrange(step)
    with put_aside(run) as folder:
        try:
            found = find(saver.save(folder, step, run.keep_last))
        except CheckpointError as error:
            log.warning("the run goes on with the actors that it has, as no checkpoint was saved:\n%s", error)
            return step
        return starter.rearrange(step, found)


def _saved(saver: Saver, run: Run, step: int) -> str:
    """Save a checkpoint in the run's folder before it ends, and say so."""
    if run.folder is None or not step:
        return "there is nothing to save yet" if not step else "it has no folder to be saved in"
    try:
        return f"saved as {saver.save(checkpoints_in(absolute(run.folder)), step, run.keep_last).name}"
    except CheckpointError as error:
        return f"nothing was saved: {'; '.join(error.faults)}"


def rewound(loaded: LoadedRun, error: NonFiniteError, bad: int) -> int:
    """Go back to the newest checkpoint of a run, and leave out the data from there to the step under way.

    Source: Chowdhery et al. 2022, "PaLM", section 5.1.

    Args:
        loaded: The run; no save is under way.
        error: What the step has raised.
        bad: Number of the step, counted from 0.

    Returns:
        The number of steps taken that the run goes on after.

    Raises:
        NonFiniteError: There is no checkpoint yet.
    """
    folder = loaded.run.folder
    assert folder is not None, "checked with the run"
    found = newest(absolute(folder) / CHECKPOINTS)
    if found is None:
        error.add_note("it can't be rewound: there is no checkpoint yet, let save_every be smaller")
        raise error
    step = found.manifest.step
    log.warning("%s; back to step %d, and on with the data after step %d", error, step + 1, bad + 1)
    state = str(found.path), loaded.calls.shared(found.manifest.tensors), step, bad
    loaded.calls.all("rewind_to", *state, what=f"loading {found.path.name}")
    return step
