"""Reading and writing the CSV files of ``torch.distributed.pipelining``: a line for each rank, a cell for each action.

Since torch 2.15 a file with communication also names the waits for sends and for reductions: ``0WAIT_SEND_F3`` comes
after ``0SEND_F3``, ``2WAIT_REDUCE_GRAD`` after ``2REDUCE_GRAD``. Raypar has no such actions: its ranks wait for
their own sends, and STEP waits for the reductions.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Iterator

from raypar.schedules.action import SENDS, STEP, Action, Op
from raypar.schedules.passes.lower import lower
from raypar.schedules.rules import MAKES_INPUT_GRADIENTS
from raypar.schedules.schedule import Schedule, ScheduleError, first_faults

_WAIT = re.compile(r"\s*[0-9]{1,18}WAIT_(SEND_[FB][0-9]{1,18}|REDUCE_GRAD)\s*")


def to_csv(schedule: Schedule, *, waits: bool = False) -> str:
    """Write a schedule as the CSV that torch loads.

    Torch's format is "compute_only" for a schedule before lowering and "compute_comms" after it. Torch knows no STEP:
    the STEP that closes a row is implied and not written. A STEP anywhere else is written, and then torch cannot read
    the file.

    Args:
        schedule: The schedule, lowered or not.
        waits: Whether to write a wait for each send and each reduction of a lowered schedule. Torch 2.15 and newer
            demand them in "compute_comms", older ones can't read them, and ``from_csv`` skips them.

    Returns:
        The text of the file.
    """
    rows = map(_without_closing_step, schedule.rows)
    return "".join(",".join(_with_waits(row) if waits else map(str, row)) + "\n" for row in rows)


def from_csv(text: str, name: str) -> Schedule:
    """Read a schedule that torch or ``to_csv`` has written.

    Empty cells, which are torch's bubbles, are skipped: the simulation computes where the bubbles are. So are the waits
    that torch 2.15 writes. An overlapped pair ``(1F1;1B0)OVERLAP_F_B`` is read as its two actions in their order. A
    training schedule with communication gets a STEP at the end of each row.

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
    if faults := first_faults(_read(text, rows)):
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
    yield from (part for part in cell.split(";") if part and not _WAIT.fullmatch(part))


def _without_closing_step(row: tuple[Action, ...]) -> tuple[Action, ...]:
    return row[:-1] if row[-1:] == (STEP,) and row.count(STEP) == 1 else row


def _with_waits(row: tuple[Action, ...]) -> Iterator[str]:
    """Yield the cells of a row with the waits where torch 2.15 puts them.

    A forward's send is waited for after the microbatch's backward, which proves that it has arrived, any other send at
    the end of the row, and a reduction at once.
    """
    sent: dict[Action, None] = {}
    for action in row:
        yield str(action)
        if action.op is Op.REDUCE_GRAD:
            yield _wait_for(action)
        elif action.op in SENDS:
            sent[action] = None
        elif action.op in MAKES_INPUT_GRADIENTS and (send := action._replace(op=Op.SEND_F)) in sent:
            del sent[send]
            yield _wait_for(send)
    yield from map(_wait_for, sent)


def _wait_for(action: Action) -> str:
    return f"{action.stage}WAIT_{action._replace(stage=None)}"
