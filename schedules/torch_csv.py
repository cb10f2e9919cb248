"""The CSV files of ``torch.distributed.pipelining``: one line a rank, one action a cell."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from raypar.schedules.action import STEP, Action
from raypar.schedules.drawing.cells import first_of
from raypar.schedules.passes.lower import lower
from raypar.schedules.schedule import Schedule, ScheduleError


def to_csv(schedule: Schedule) -> str:
    """Write a schedule so that torch loads it: format "compute_only" before lowering, "compute_comms" after it.

    torch knows no STEP. The one that closes a row is implied by the format and not written; a STEP anywhere else is,
    and then torch cannot read the file.
    """
    return "".join(",".join(map(str, _without_closing_step(row))) + "\n" for row in schedule.rows)


def from_csv(text: str, name: str) -> Schedule:
    """Read a schedule that torch or ``to_csv`` has written.

    Empty cells, torch's bubbles, are left out: where they are is for the simulation to tell. An overlapped pair
    ``(1F1;1B0)OVERLAP_F_B`` is read as its parts in their order. A training file with communication gets the STEP
    that closes each row.

    Raises ScheduleError with line and column of the first cells that cannot be read, or if the rows make no schedule.
    """
    rows: list[list[Action]] = []
    if faults := first_of(_read(text, rows)):
        raise ScheduleError(f"schedule {name!r} cannot be read:\n" + "\n".join(faults))
    schedule = Schedule.of(name, rows)
    return lower(schedule) if schedule.lowered else schedule


def _read(text: str, rows: list[list[Action]]) -> Iterator[str]:
    """Add the rows of a text to ``rows``; yields what is wrong with its cells."""
    for line, cells in enumerate(csv.reader(io.StringIO(text.removeprefix("\ufeff"))), start=1):
        row: list[Action] = []
        for column, cell in enumerate(cells, start=1):
            for part in _parts(cell):
                try:
                    row.append(Action.parse(part))
                except ValueError as error:
                    yield f"line {line}, column {column}: {error}"
        if row or any(cells):
            rows.append(row)  # a blank line is no rank


def _parts(cell: str) -> Iterator[str]:
    cell = cell.strip()
    if cell.startswith("(") and cell.endswith(")OVERLAP_F_B"):
        cell = cell[1:].removesuffix(")OVERLAP_F_B")
    yield from (part for part in cell.split(";") if part)


def _without_closing_step(row: tuple[Action, ...]) -> tuple[Action, ...]:
    return row[:-1] if row[-1:] == (STEP,) and row.count(STEP) == 1 else row
