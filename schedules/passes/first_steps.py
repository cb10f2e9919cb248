"""The first steps of an asynchronous schedule: a shorter stream, for use before an evaluation or a checkpoint."""

from __future__ import annotations

from dataclasses import replace

from raypar.schedules.action import WHOLE_STAGE, Action, Op
from raypar.schedules.schedule import Schedule, ScheduleError


def first_steps(schedule: Schedule, steps: int) -> Schedule:
    """Leave out all but the first steps of an asynchronous schedule.

    The remaining actions keep their order. They need no action that is left out, because an action needs only actions
    of its microbatch, and versions made by earlier steps.

    Args:
        schedule: The schedule, lowered or not.
        steps: Number of steps, from 1 to the number of the schedule.

    Returns:
        The shorter schedule.

    Raises:
        ScheduleError: The schedule is synchronous, or has fewer steps.
    """
    if not 1 <= steps <= schedule.stream:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.stream} steps that overlap: {steps} can't be taken"
        )
    microbatches = steps * schedule.microbatches_a_step
    rows = (tuple(_shortened(row, steps, microbatches)) for row in schedule.rows)
    return replace(schedule, rows=tuple(rows), num_microbatches=microbatches, stream=steps)


def _shortened(row: tuple[Action, ...], steps: int, microbatches: int) -> list[Action]:
    """Return the actions of a row that belong to the first steps."""
    kept: list[Action] = []
    uses: list[Action] = []  # the last USE, until its first forward
    updates = 0
    for action in row:
        op, number = action.op, action.microbatch
        if op is Op.USE:
            uses = [action]
        elif op in WHOLE_STAGE:  # the reduction before an update
            kept += [action] if updates < steps else []
        elif number is not None and number < (steps if op in (Op.STEP, Op.VALIDATE) else microbatches):
            kept += [*uses, action] if op is Op.F else [action]
            uses = [] if op is Op.F else uses
        updates += op is Op.STEP
    return kept
