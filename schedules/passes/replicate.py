"""Replicas of pipeline ranks: the row of a rank becomes one row for each replica, and microbatches go in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raypar.schedules.action import WHOLE_STAGE, Action, Op
from raypar.schedules.schedule import Schedule, ScheduleError


def replicate(schedule: Schedule, replicas: Sequence[int]) -> Schedule:
    """Give pipeline ranks replicas, each with a row. Replica j of r performs the microbatches k = j mod r.

    A forward and its backward are on one replica. Each replica makes all updates of its stages.

    The rows keep their order, so that they deadlock only if the schedule did. Proof: take an order in which the
    schedule can be performed. If the replica whose turn it is performs each action, and all replicas perform those of
    whole stages, the new rows can be performed in the same order; and fewer values are under way to each peer.

    Args:
        schedule: The schedule, of compute actions, with one row for each pipeline rank.
        replicas: The number of replicas of each pipeline rank.

    Returns:
        The schedule; the same one if no rank has several.

    Raises:
        ScheduleError: The schedule is lowered or has replicas, or the numbers are not one or more for each rank.

    Source: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", section 3.2
    (1F1B-RR).
    """
    faults = []
    if schedule.lowered or schedule.replicas:
        faults.append("replicas are given before it is lowered, and once: start from its compute actions")
    if len(replicas) != schedule.num_ranks or min(replicas, default=0) < 1:
        numbers = "-".join(map(str, replicas))
        faults.append(
            f"replicas {numbers or 'of no rank'}: give a number of one or more for each of {schedule.num_ranks} ranks"
        )
    if faults:
        raise ScheduleError(f"schedule {schedule.name!r}: " + "; ".join(faults))
    if max(replicas) == 1:
        return schedule
    rows = (
        tuple(action for action in row if _is_turn_of(action, replica, count))
        for row, count in zip(schedule.rows, replicas, strict=True)
        for replica in range(count)
    )
    return replace(schedule, rows=tuple(rows), replicas=tuple(replicas))


def _is_turn_of(action: Action, replica: int, count: int) -> bool:
    """Return whether one of several replicas performs an action of their rank."""
    if action.microbatch is None or action.op in WHOLE_STAGE or action.op in (Op.STEP, Op.USE):
        return True
    return action.microbatch % count == replica
