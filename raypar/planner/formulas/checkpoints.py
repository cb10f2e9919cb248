"""How often to save a checkpoint, and what part of the time trains, where failures come at random."""

from __future__ import annotations

import math


def young_interval(save: float, mtbf: float) -> float:
    """Return the seconds of training between two saves that waste least, to first order: sqrt(2 d M).

    Args:
        save: Seconds d for which a save stops the training.
        mtbf: Mean time M between two failures of the whole job, in seconds.

    Source: Young 1974, "A First Order Approximation to the Optimum Checkpoint Interval".

    Examples:
        >>> round(young_interval(save=20, mtbf=70_000))
        1673
    """
    return math.sqrt(2 * save * mtbf)


def daly_interval(save: float, mtbf: float) -> float:
    """Return the seconds of training between two saves that waste least, to higher order; M if saves take over 2 M.

    Args:
        save: Seconds d for which a save stops the training.
        mtbf: Mean time M between two failures of the whole job, in seconds.

    Source: Daly 2006, "A Higher Order Estimate of the Optimum Checkpoint Interval for Restart Dumps", equation 37.

    Examples:
        >>> round(daly_interval(save=60, mtbf=7200)), round(young_interval(save=60, mtbf=7200))
        (890, 930)
    """
    if save >= 2 * mtbf:
        return mtbf
    part = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - save


def goodput(interval: float, save: float, restart: float, mtbf: float) -> float:
    """Return the part of the time that trains and is not lost, 0 to 1.

    Failures come at any time, also in saves and restarts, independent of one another.

    Args:
        interval: Seconds of training between two saves.
        save: Seconds for which a save stops the training.
        restart: Seconds from a failure until the job trains again from its last checkpoint.
        mtbf: Mean time between two failures of the whole job, in seconds; infinite if there are none.

    Source: Daly 2006, equation 20, the expected time of a job.

    Examples:
        >>> round(goodput(interval=1664, save=20, restart=300, mtbf=70_308), 3)
        0.972
    """
    if math.isinf(mtbf):
        return interval / (interval + save)
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf))
