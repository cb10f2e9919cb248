"""The faults that a check finds, and the error that shows them in the schedule."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from raypar.schedules.drawing.cells import excerpt
from raypar.schedules.schedule import MOST_SHOWN, Schedule, ScheduleError, first_faults


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken rule.

    Attributes:
        rank: The pipeline rank.
        index: The position in the rank's row, or None if the fault is a missing action.
        rule: The name of the rule, as ``check`` lists them.
        sentence: What is wrong.
    """

    rank: int
    index: int | None
    rule: str
    sentence: str

    def __str__(self) -> str:
        return self.line(f"rank {self.rank}")

    def line(self, label: str) -> str:
        """Return the fault as a line of text.

        Args:
            label: The name of its row; see ``Schedule.label``.
        """
        position = "" if self.index is None else f", action {self.index}"
        return f"{self.rule}: {label}{position}: {self.sentence}"


class CheckError(ScheduleError):
    """A schedule that must not run. ``faults`` lists all faults; the text shows the first ones."""

    def __init__(self, message: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(message)
        self.faults = list(faults)

    @classmethod
    def of(cls, schedule: Schedule, faults: Sequence[Fault], circle: Collection[tuple[int, int]] = ()) -> CheckError:
        """Make the error of a list of faults, with the schedule drawn around the first one.

        Args:
            schedule: The schedule that was checked.
            faults: The faults, at least one.
            circle: The cells ``(rank, index)`` that wait for one another, if the last fault is a deadlock. They are
                marked; if the deadlock is the only fault, only their ranks are shown.

        Returns:
            The error.
        """
        first = faults[0]
        cells = {*circle, *((fault.rank, fault.index) for fault in faults[:MOST_SHOWN] if fault.index is not None)}
        centre = (first.rank, first.index if first.index is not None else len(schedule.rows[first.rank]))
        among = {rank for rank, _ in circle} if len(faults) == 1 else None
        count = "a rule" if len(faults) == 1 else f"{len(faults)} rules"
        text = [f"schedule {schedule.name!r} breaks {count}:", excerpt(schedule, centre, cells, among)]
        text += first_faults(fault.line(schedule.label(fault.rank)) for fault in faults)
        return cls("\n".join(text), faults)

    @property
    def picture(self) -> str:
        """Return the text without its first line: the schedule around the first fault, and the faults."""
        return str(self).partition("\n")[2]
