"""Steps of a synchronous schedule without a flush in between: updates are made at once and validated later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from raypar.schedules.action import SENDS, Action, Op
from raypar.schedules.rules import partner
from raypar.schedules.schedule import Schedule, ScheduleError


def without_flush(schedule: Schedule, steps: int) -> Schedule:
    """Put several steps of a schedule into one stream. Every forward computes with the weights of the step before.

    A stage updates after its last weight gradient, and goes on with forwards of the next step. It validates the update
    when all stages have updated: rank s of p does so after at most p - 1 - s forwards. By then the last rank has ended
    the step too, if each rank ends one forward later than the previous one, as in ZB-H2.

    Args:
        schedule: A synchronous schedule of compute actions, with one stage a rank.
        steps: Number of steps.

    Returns:
        The stream, without communication.

    Raises:
        ScheduleError: The schedule has another kind.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 4 (post-validation).
    """
    if schedule.stream or schedule.forward_only or schedule.lowered or schedule.replicas:
        raise ScheduleError(
            f"schedule {schedule.name!r} is not the compute actions of one synchronous step, one row a rank, of which "
            "several can be put into a stream: leave steps (flush_every) out"
        )
    if schedule.num_stages > schedule.num_ranks:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.num_stages} stages on {schedule.num_ranks} ranks, and without a "
            "flush each rank has one: set schedule to 'zb-h2', say, or leave steps (flush_every) out"
        )
    ahead = [*_ahead(schedule)]
    rows = [
        tuple(_row(row, steps, count, schedule.num_microbatches))
        for row, count in zip(schedule.rows, ahead, strict=True)
    ]
    return replace(
        schedule,
        rows=tuple(rows),
        num_microbatches=steps * schedule.num_microbatches,
        stream=steps,
        validated=True,
    )


def outside_validation(rows: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Move SENDs from between a STEP and its VALIDATE to after it, if their RECVs come after the other rank's VALIDATE.

    Args:
        rows: Lowered rows of a schedule whose updates are validated.
    """
    pending_of = [_unvalidated(row) for row in rows]
    inside = set[Action]().union(*pending_of)
    moved: list[list[Action]] = []
    for row, pending in zip(rows, pending_of, strict=True):
        full, late = list[Action](), list[Action]()
        for action in row:
            if action.op in SENDS and action in pending and partner(action) not in inside:
                late.append(action)
            else:
                full.append(action)
            if action.op is Op.VALIDATE:
                full += late
                late.clear()
        moved.append(full)
    return moved


def _unvalidated(row: Sequence[Action]) -> set[Action]:
    """Return the actions of a row between a STEP and its VALIDATE."""
    found, is_pending = set[Action](), False
    for action in row:
        if action.op is Op.STEP or action.op is Op.VALIDATE:
            is_pending = action.op is Op.STEP
        elif is_pending:
            found.add(action)
    return found


def _ahead(schedule: Schedule) -> Iterator[int]:
    """Yield the number of forwards of the next step that each rank performs before it validates an update."""
    before = schedule.num_microbatches
    for rank, row in enumerate(schedule.rows):
        first = next((at for at, action in enumerate(row) if action.op is not Op.F), len(row))
        before = min(before, first, schedule.num_ranks - 1 - rank)
        yield before


def _row(row: Sequence[Action], steps: int, ahead: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of a rank in all steps."""
    stage = row[0].stage
    for step in range(steps):
        for at, action in enumerate(row):
            if step and at == ahead:
                yield Action(stage, Op.VALIDATE, step - 1)
            assert action.microbatch is not None
            yield action._replace(microbatch=step * microbatches + action.microbatch)
        yield Action(stage, Op.STEP, step)
        if step + 1 < steps:
            yield Action(stage, Op.USE, step + 1)
    yield Action(stage, Op.VALIDATE, steps - 1)
