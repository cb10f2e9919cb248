"""Skip connections: what a stage gives to a later one besides what each stage gives to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raypar.schedules.schedule import Schedule, ScheduleError

Skips = tuple[tuple[int, int], ...]


def no_skips(num_stages: int) -> Skips:
    """Return no pairs, whatever the number of stages."""
    return ()


def with_skips(schedule: Schedule, skips: Sequence[tuple[int, int]]) -> Schedule:
    """Add skip connections between stages. Lowering sends each straight from its stage to the other, and back.

    The rows stay as they are: they need nothing that they did not need before, as the other stage's forward comes
    behind all stages between.

    Args:
        schedule: The schedule, of compute actions; a lowered one must have the SENDs and RECVs already.
        skips: Pairs of stages: the first one gives something to the second one, which comes later.

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
