"""Skip connections: values that a stage sends to a later stage than the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raypar.schedules.schedule import Schedule, ScheduleError

Skips = tuple[tuple[int, int], ...]


def no_skips(num_stages: int) -> Skips:
    """Return no pairs, for any number of stages."""
    return ()


def with_skips(schedule: Schedule, skips: Sequence[tuple[int, int]]) -> Schedule:
    """Add skip connections between stages. Lowering sends each directly from its source to its target, and back.

    The rows stay as they are: their order still satisfies all dependencies, because the target's forward comes after
    those of all stages in between.

    Args:
        schedule: The schedule, of compute actions; a lowered one must have the SENDs and RECVs already.
        skips: Pairs of stages, source and target: the target comes later.

    Raises:
        ScheduleError: A pair is not of an earlier and a later stage, or is given twice.
    """
    faults = [
        f"skip {source}-{target} is not from an earlier stage to a later one of {schedule.num_stages}: correct it"
        for source, target in skips
        if not 0 <= source < target < schedule.num_stages
    ]
    faults += [f"skip {one[0]}-{one[1]} is given twice: leave one out" for one in set(skips) if skips.count(one) > 1]
    if faults:
        raise ScheduleError(f"schedule {schedule.name!r}: " + "; ".join(faults))
    return replace(schedule, skips=tuple(sorted(skips)))
