"""A second opinion on asynchronous schedules: each stage performs its updates, with the gradients that are there.

Nothing of ``raypar.schedules`` is used but the data types, so what is wrong there can't be wrong here in the same way.
"""

from __future__ import annotations

from raypar.schedules.action import Action, Op
from raypar.schedules.schedule import Schedule


def wrong_updates(schedule: Schedule) -> str | None:
    """Why some update of an asynchronous schedule is not that of its step, or a version is used that is not there."""
    reduces = any(action.op is Op.REDUCE_GRAD for row in schedule.rows for action in row)
    for stage in range(len(schedule.placement)):
        why = _wrong_updates(schedule, stage, reduces)
        if why is not None:
            return f"stage {stage}: {why}"
    return None


def _wrong_updates(schedule: Schedule, stage: int, reduces: bool) -> str | None:
    if schedule.num_microbatches % schedule.stream:
        return "steps of unequal length"
    a_step = schedule.num_microbatches // schedule.stream
    num_versions, gradients, unreduced = 1, list[int](), False
    for action in _of_stage(schedule, stage):
        number = action.microbatch
        if action.op in (Op.B, Op.W):
            gradients.append(number)
            unreduced = True
        elif action.op is Op.REDUCE_GRAD:
            unreduced = False
        elif action.op is Op.USE and number >= num_versions:
            return f"{action}, but there are versions 0 to {num_versions - 1}"
        elif action.op is Op.STEP:
            wanted = range(number * a_step, (number + 1) * a_step)
            if number != num_versions - 1 or sorted(gradients) != list(wanted):
                return f"{action} is update {num_versions - 1} and has the gradients of {sorted(gradients)}"
            if reduces and unreduced:
                return f"{action} has gradients that are not reduced"
            num_versions, gradients = num_versions + 1, []
    if num_versions != schedule.stream + 1 or gradients:
        return f"it makes {num_versions - 1} updates, and leaves the gradients of {gradients}"
    return None


def most_kept(schedule: Schedule, stage: int) -> int:
    """The most versions that a stage of a right asynchronous schedule keeps at once.

    A version lasts from its update to the next one, and at least to the last weight gradient of what computes with it.
    """
    row = _of_stage(schedule, stage)
    made, needed, used, version = {0: -1}, {}, {}, 0
    for place, (_, op, number, _) in enumerate(row):
        if op is Op.USE:
            version = number
        elif op is Op.F:
            used[number] = version
        elif op in (Op.B, Op.W):
            needed[used[number]] = place
        elif op is Op.STEP:
            made[number + 1] = place
    ends = {one: max(made.get(one + 1, len(row)), needed.get(one, 0)) for one in made}
    return max(sum(made[one] <= place < ends[one] for one in made) for place in range(-1, len(row)))


def _of_stage(schedule: Schedule, stage: int) -> list[Action]:
    return [action for action in schedule.rows[schedule.placement[stage]] if action.stage == stage]
