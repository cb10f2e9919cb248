"""What a check found: the faults, and the error that shows them in the schedule."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from raypar.schedules.drawing.cells import MOST_SHOWN, excerpt, first_of
from raypar.schedules.schedule import Schedule, ScheduleError


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken rule: on which rank, at which place of its row (None if something is absent), which rule, and how."""

    rank: int
    index: int | None
    rule: str
    sentence: str

    def __str__(self) -> str:
        place = "" if self.index is None else f", action {self.index}"
        return f"{self.rule}: rank {self.rank}{place}: {self.sentence}"


class CheckError(ScheduleError):
    """A schedule that must not run. ``faults`` lists everything that was found, the text shows the first ones."""

    def __init__(self, message: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(message)
        self.faults = list(faults)

    @classmethod
    def of(cls, schedule: Schedule, faults: Sequence[Fault], circle: Collection[tuple[int, int]] = ()) -> CheckError:
        """The error for the faults, with the schedule around the first one and its cell marked.

        ``circle`` are the cells ``(rank, index)`` that wait for one another, if the last fault is a deadlock: they are
        marked, and if it is the only fault no other ranks are shown.
        """
        first = faults[0]
        cells = {*circle, *((fault.rank, fault.index) for fault in faults[:MOST_SHOWN] if fault.index is not None)}
        centre = (first.rank, first.index if first.index is not None else len(schedule.rows[first.rank]))
        among = {rank for rank, _ in circle} if len(faults) == 1 else None
        count = "a rule" if len(faults) == 1 else f"{len(faults)} rules"
        text = [f"schedule {schedule.name!r} breaks {count}:", excerpt(schedule, centre, cells, among)]
        text += first_of(map(str, faults))
        return cls("\n".join(text), faults)

    @property
    def picture(self) -> str:
        """The text without its first line: the schedule around the first fault, and the faults."""
        return str(self).partition("\n")[2]
