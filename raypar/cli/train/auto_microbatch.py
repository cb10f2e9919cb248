"""``--auto-microbatch``: the largest microbatch that fits, with what was looked at in the log."""

from __future__ import annotations

import logging

from raypar.actors.specs.run import Run
from raypar.config.run import check_run
from raypar.schedules.schedule import Schedule


def chosen(run: Run, schedule: Schedule, *, wanted: bool, probes: bool, room: float = 0.0) -> tuple[Run, Schedule]:
    """Return a run with the largest microbatch that fits, and the schedule of its step.

    Args:
        run: The run, which was checked.
        schedule: The lowered schedule of its training step.
        wanted: Whether the microbatch is to be chosen; otherwise both are returned as they are.
        probes: Whether a step is measured on actors, and not forecast only.
        room: GiB that each actor may take; 0: an equal part of what is free here.

    Raises:
        ConfigError: No microbatch fits.
        JobError: A probe failed.
    """
    if not wanted:
        return run, schedule
    from raypar.job.microbatch import fit_microbatch, measured_peak

    found = fit_microbatch(run, max(1, round(room * 2**30)) if room else None, measured_peak if probes else None)
    for finding in found.findings:
        logging.getLogger("raypar").info("auto-microbatch: %s", finding)
    return found.run, check_run(found.run)["train"]
