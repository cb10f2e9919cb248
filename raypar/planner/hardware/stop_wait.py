"""How many seconds pass between SIGTERM and SIGKILL when a run is stopped, and whether a save fits into them."""

from __future__ import annotations

import os

SAVE_SECONDS = 2.0  # for a checkpoint at the end
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"  # of Ray's job supervisor
_OF_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # is in the environment of what ray job submit has started
_OF_RAY = 3.0  # seconds, where STOP_WAIT is not set
_OF_OTHERS = 10.0  # seconds: of docker stop; Kubernetes and Slurm wait longer


def is_ray_job() -> bool:
    """Return whether ``ray job submit`` has started this process."""
    return _OF_A_JOB in os.environ


def stop_wait() -> float:
    """Return the seconds after SIGTERM in which a run has to be saved."""
    if not is_ray_job():
        return _OF_OTHERS
    given = os.environ.get(STOP_WAIT, "")
    return float(given) if given.isdigit() else _OF_RAY


def outlasts(step: float) -> bool:
    """Return whether a run that is stopped at the beginning of a step may be killed before it is saved after the step.

    Args:
        step: Seconds of the step.
    """
    return step + SAVE_SECONDS > stop_wait()
