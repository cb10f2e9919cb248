"""The CSV files of ``torch.distributed.pipelining``, read and written: a line for each rank, an action in each cell."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator

from raypar.schedules.action import STEP, Action
from raypar.schedules.passes.lower import lower
from raypar.schedules.schedule import Schedule, ScheduleError, first_of


def to_csv(schedule: Schedule) -> str:
    """Write a schedule as the CSV that torch loads.

    Torch's format is "compute_only" for a schedule before lowering and "compute_comms" after it. Torch knows no STEP:
    the STEP that closes a row is implied and not written. A STEP anywhere else is written, and then torch cannot read
    the file.

    Args:
        schedule: The schedule, lowered or not.

    Returns:
        The text of the file.
    """
    return "".join(",".join(map(str, _without_closing_step(row))) + "\n" for row in schedule.rows)


def from_csv(text: str, name: str) -> Schedule:
    """Read a schedule that torch or ``to_csv`` has written.

    Empty cells, which are torch's bubbles, are skipped: the simulation computes where the bubbles are. An overlapped
    pair ``(1F1;1B0)OVERLAP_F_B`` is read as its two actions in their order. A training schedule with communication gets
    a STEP at the end of each row.

    Args:
        text: The text of the file.
        name: The name of the schedule.

    Returns:
        The schedule; it is lowered if the file has communication.

    Raises:
        ScheduleError: If cells can't be read (the text names line and column of the first ones), or if the rows make no
            schedule.
    """
    rows: list[list[Action]] = []
    if faults := first_of(_read(text, rows)):
        raise ScheduleError(f"schedule {name!r} cannot be read:\n" + "\n".join(faults))
    schedule = Schedule.of(name, rows)
    return lower(schedule) if schedule.lowered else schedule


def _read(text: str, rows: list[list[Action]]) -> Iterator[str]:
    """Append the rows of a text to ``rows``, and yield what is wrong with its cells."""
    lines = csv.reader(io.StringIO(text.removeprefix("\ufeff")), strict=True)
    for line in itertools.count(1):
        try:
            cells = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"line {line}: {error}: does a quote have no end?"
            return
        row: list[Action] = []
        for column, cell in enumerate(cells, start=1):
            for part in _parts(cell):
                try:
                    row.append(Action.parse(part))
                except ValueError as error:
                    yield f"line {line}, column {column}: {error}"
        if row or any(cells):
            rows.append(row)  # a blank line is not a rank


def _parts(cell: str) -> Iterator[str]:
    cell = cell.strip()
    if cell.startswith("(") and cell.endswith(")OVERLAP_F_B"):
        cell = cell[1:].removesuffix(")OVERLAP_F_B")
    yield from (part for part in cell.split(";") if part)


def _without_closing_step(row: tuple[Action, ...]) -> tuple[Action, ...]:
    return row[:-1] if row[-1:] == (STEP,) and row.count(STEP) == 1 else row
