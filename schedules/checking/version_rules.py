"""The rules of asynchronous schedules: when stages update, which versions they use, and how updates are validated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from raypar.schedules.action import RECVS, SENDS, Action, Op
from raypar.schedules.checking.errors import Fault
from raypar.schedules.rules import MAKES_GRADIENTS, partner
from raypar.schedules.schedule import Schedule
from raypar.schedules.versions import Versions

_RULE = "versions"
_VALIDATE = "validate"
_AGAIN = frozenset({Op.F, Op.SEND_F, Op.RECV_F, Op.USE})  # what can be performed again with other weights

Windows = dict[Action, tuple[int, int, int | None]]  # by SEND or RECV: row, position, and the step not validated there


def version_rule_faults(schedule: Schedule, rank: int, most: int | None = None) -> Iterator[Fault]:
    """Yield the faults of the updates and versions in a row of an asynchronous schedule.

    Args:
        schedule: The schedule; a synchronous one breaks none here.
        rank: The row's rank.
        most: The most versions that a stage may keep; None for no limit.
    """
    if not schedule.stream:
        return
    if schedule.num_microbatches % schedule.stream:
        if rank == 0:  # it is not the fault of any row
            sentence = f"{schedule.num_microbatches} microbatches are not {schedule.stream} steps of equal length"
            yield Fault(rank, None, _RULE, sentence)
        return
    for stage in schedule.stages_of(rank):
        yield from _StageCheck(schedule, rank, stage, most).faults()
    for index, action in enumerate(schedule.rows[rank]):
        if action == Action(None, Op.STEP, None):
            sentence = "STEP of all stages in an asynchronous schedule: give each stage its own, such as 0STEP0"
            yield Fault(rank, index, _RULE, sentence)


class _StageCheck:
    """The check of one stage's updates and versions."""

    def __init__(self, schedule: Schedule, rank: int, stage: int, most: int | None) -> None:
        self._schedule = schedule
        self._rank = rank
        self._stage = stage
        self._most = most
        self._versions = Versions(schedule.rows[rank], stage)
        self._reduces = Action(stage, Op.REDUCE_GRAD, None) in schedule.rows[rank]
        self._unreduced = False
        self._made: defaultdict[int, int] = defaultdict(int)  # by step, weight gradients since the last update
        self._updates = 0

    def faults(self) -> Iterator[Fault]:
        """Yield what is wrong, in the order of the row, and then what is missing."""
        steps, a_step = self._schedule.stream, self._schedule.microbatches_a_step
        for index, action in enumerate(self._schedule.rows[self._rank]):
            stage, op, number, _ = action
            if stage != self._stage:
                continue
            if op is Op.REDUCE_GRAD:
                self._unreduced = False
            if number is None:
                continue
            if op is Op.STEP:
                yield from self._step(index, action, number)
            elif op is Op.USE and number > self._updates:
                sentence = f"{action} uses a version that {stage}STEP{number - 1} makes: put it after that"
                yield Fault(self._rank, index, _RULE, sentence)
            elif op in MAKES_GRADIENTS:
                self._made[number // a_step] += 1
                self._unreduced = True
            self._versions.perform(action)
            yield from self._bounded(index, action)
        for step in range(self._updates, steps):
            yield Fault(
                self._rank, None, _RULE, f"stage {self._stage} has no STEP{step}: every stage makes every update"
            )

    def _step(self, index: int, action: Action, number: int) -> Iterator[Fault]:
        """Check an update."""
        if number >= self._schedule.stream:
            sentence = f"{action}: the schedule has {self._schedule.stream} steps only"
            yield Fault(self._rank, index, _RULE, sentence)
        elif number != self._updates:
            sentence = f"{action} is the stage's update number {self._updates}: put them in the order of the steps"
            yield Fault(self._rank, index, _RULE, sentence)
        else:
            share = len(self._schedule.microbatches_of(self._rank, self._stage)) // self._schedule.stream
            left = share - self._made.pop(number, 0)
            if left > 0:
                sentence = f"{action} comes before {left} weight gradients (B or W) of its step: put it after them"
                yield Fault(self._rank, index, _RULE, sentence)
        if later := sorted(self._made):
            sentence = f"{action} would take weight gradients of step {later[0]} too: put it before them"
            yield Fault(self._rank, index, _RULE, sentence)
            self._made.clear()
        if self._reduces and self._unreduced:
            sentence = f"{action} takes weight gradients that are not reduced: put {self._stage}REDUCE_GRAD before it"
            yield Fault(self._rank, index, "reduce", sentence)
            self._unreduced = False
        self._updates += 1

    def _bounded(self, index: int, action: Action) -> Iterator[Fault]:
        """Report the first action after which more versions are kept than allowed."""
        kept = self._versions.kept
        if self._most is not None and len(kept) > self._most:
            later = self._schedule.rows[self._rank][index + 1 :]
            needs = next((other for other in later if self._uses(other, kept[0])), None)
            why = f"{needs} needs version {kept[0]}, with which its forward has computed"
            if needs is None:
                why = f"a forward has computed with version {kept[0]}, and no backward of it comes"
            sentence = (
                f"{action} makes it {len(kept)} versions of stage {self._stage} ({', '.join(map(str, kept))}), "
                f"the bound is {self._most}: {why}"
            )
            yield Fault(self._rank, index, _RULE, sentence)
            self._most = None

    def _uses(self, action: Action, version: int) -> bool:
        """Return whether an action is the backward of a microbatch that uses a version of this stage."""
        stage, op, number, _ = action
        return (
            stage == self._stage
            and op in MAKES_GRADIENTS
            and number in self._versions.used
            and (self._versions.used[number] == version)
        )


def validation_faults(schedule: Schedule) -> Iterator[Fault]:
    """Yield the faults of a schedule's STEPs and VALIDATEs, if its updates are validated.

    Args:
        schedule: The schedule.
    """
    if not schedule.validated:
        return
    if not schedule.stream or schedule.num_stages > schedule.num_ranks or schedule.replicas:
        sentence = "VALIDATE is for streams with one stage and one row a rank: take it out"
        yield Fault(0, None, _VALIDATE, sentence)
        return
    windows: Windows = {}
    for rank in range(schedule.num_ranks):
        yield from _row_faults(schedule, rank, windows)
    for action, (rank, index, step) in windows.items():
        other = windows.get(partner(action))
        if action.op in SENDS and other is not None and other[2] != step:
            sentence = f"{action} is {_window(step)}, and {partner(action)} {_window(other[2])}"
            yield Fault(rank, index, _VALIDATE, f"{sentence}: put both before VALIDATE, or both after it")


def _row_faults(schedule: Schedule, rank: int, windows: Windows) -> Iterator[Fault]:
    """Yield the faults of one row, and record between which STEP and VALIDATE each SEND and RECV is."""
    step: int | None = None
    validated = 0
    for index, action in enumerate(schedule.rows[rank]):
        if action.op in SENDS or action.op in RECVS:
            windows[action] = rank, index, step
        if action.op is Op.VALIDATE:
            if action.microbatch != step:
                yield Fault(rank, index, _VALIDATE, f"{action} does not come after its own STEP: put it there")
            step, validated = None, validated + 1
        elif step is not None and action.op not in _AGAIN:
            sentence = f"{action} comes between {action.stage}STEP{step} and its VALIDATE, and could not be taken back"
            yield Fault(rank, index, _VALIDATE, f"{sentence}: put VALIDATE before it")
            step = action.microbatch if action.op is Op.STEP else step
        elif action.op is Op.STEP:
            step = action.microbatch
    if validated != schedule.stream:
        sentence = f"the row has {validated} VALIDATE for {schedule.stream} updates: give one for each STEP"
        yield Fault(rank, None, _VALIDATE, sentence)


def _window(step: int | None) -> str:
    return "not between a STEP and its VALIDATE" if step is None else f"between STEP{step} and its VALIDATE"
