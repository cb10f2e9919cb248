"""The rules of updates that are validated later: what stands between a STEP and its VALIDATE."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.schedules.action import RECVS, SENDS, Action, Op
from raypar.schedules.checking.errors import Fault
from raypar.schedules.rules import partner
from raypar.schedules.schedule import Schedule

_RULE = "validate"
_AGAIN = frozenset({Op.F, Op.SEND_F, Op.RECV_F, Op.USE})  # what can be performed again with other weights

Windows = dict[Action, tuple[int, int, int | None]]  # by SEND or RECV: its row, its place, and the step in doubt there


def validation_faults(schedule: Schedule) -> Iterator[Fault]:
    """Yield where a schedule whose updates are validated breaks the rules of that.

    Args:
        schedule: The schedule.
    """
    if not schedule.validated:
        return
    if not schedule.stream or schedule.num_stages > schedule.num_ranks or schedule.replicas:
        sentence = "VALIDATE is for streams with one stage and one row a rank: take it out"
        yield Fault(0, None, _RULE, sentence)
        return
    windows: Windows = {}
    for rank in range(schedule.num_ranks):
        yield from _row_faults(schedule, rank, windows)
    for action, (rank, index, step) in windows.items():
        other = windows.get(partner(action))
        if action.op in SENDS and other is not None and other[2] != step:
            told = f"{action} is {_place(step)}, and {partner(action)} {_place(other[2])}"
            yield Fault(rank, index, _RULE, f"{told}: put both before VALIDATE, or both behind it")


def _row_faults(schedule: Schedule, rank: int, windows: Windows) -> Iterator[Fault]:
    """Yield the faults of one row, and note for each SEND and RECV between which STEP and VALIDATE it stands."""
    step: int | None = None
    validated = 0
    for index, action in enumerate(schedule.rows[rank]):
        if action.op in SENDS or action.op in RECVS:
            windows[action] = rank, index, step
        if action.op is Op.VALIDATE:
            if action.microbatch != step:
                yield Fault(rank, index, _RULE, f"{action} does not come behind its own STEP: put it there")
            step, validated = None, validated + 1
        elif step is not None and action.op not in _AGAIN:
            told = f"{action} stands between {action.stage}STEP{step} and its VALIDATE, and could not be taken back"
            yield Fault(rank, index, _RULE, f"{told}: put VALIDATE before it")
            step = action.microbatch if action.op is Op.STEP else step
        elif action.op is Op.STEP:
            step = action.microbatch
    if validated != schedule.stream:
        sentence = f"the row has {validated} VALIDATE for {schedule.stream} updates: give one for each STEP"
        yield Fault(rank, None, _RULE, sentence)


def _place(step: int | None) -> str:
    return "not between a STEP and its VALIDATE" if step is None else f"between STEP{step} and its VALIDATE"
