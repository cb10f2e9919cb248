"""Go back before a step that is not finite, and leave out its data."""

from __future__ import annotations

import logging

from raypar.actors.errors import NonFiniteError
from raypar.checkpoint.find import newest
from raypar.job.start.loaded_run import LoadedRun
from raypar.paths import CHECKPOINTS, absolute

log = logging.getLogger(__name__)


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
