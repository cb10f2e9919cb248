"""Rows as people write them, read as rows of Actions."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from raypar.schedules.action import Action, Op

MOST_LISTED = 8


def read_rows(written: Any) -> tuple[tuple[Action, ...], ...]:
    """One row a rank, of Actions, of texts like "1F0" or of triples like (1, "F", 0); a row may also be one text.

    Raises ValueError with all that can't be read.
    """
    if isinstance(written, str | bytes) or not isinstance(written, Iterable):
        raise ValueError(f"{_brief(written)} is no schedule: give one row of actions a rank")
    rows: list[tuple[Action, ...]] = []
    faults: list[str] = []
    for rank, row in enumerate(written):
        if isinstance(row, bytes) or not isinstance(row, Iterable):
            faults.append(f"row {rank} is {_brief(row)}: it must be a sequence of actions")
            continue
        cells = row.split() if isinstance(row, str) else tuple(row)
        try:
            rows.append(tuple(map(_read, cells)))
        except ValueError:
            faults += [
                f"row {rank}, action {place}: {fault}" for place, cell in enumerate(cells) for fault in _faults(cell)
            ]
    if faults:
        more = f"; and {len(faults) - MOST_LISTED} more" if len(faults) > MOST_LISTED else ""
        raise ValueError("; ".join(faults[:MOST_LISTED]) + more)
    return tuple(rows)


def _read(cell: Any) -> Action:
    """An op may be a text, and a number one of numpy's; raises ValueError."""
    if isinstance(cell, Action) and cell.op.__class__ is Op:
        return cell
    if isinstance(cell, str):
        return Action.parse(cell)
    try:
        stage, op, microbatch = cell
        numbers = [number if number is None else index(number) for number in (stage, microbatch)]
        action = Action(numbers[0], Op(op), numbers[1])
    except (TypeError, ValueError):
        raise ValueError(f"{_brief(cell)} is not an action: write Action(1, Op.F, 0), or '1F0'") from None
    return Action.parse(str(action))


def _faults(cell: Any) -> list[str]:
    try:
        _read(cell)
    except ValueError as error:
        return [str(error)]
    return []


def _brief(value: object) -> str:
    text = repr(tuple(value) if isinstance(value, tuple) else value)  # an Action with a text for its op has no repr
    return text if len(text) <= 60 else f"{text[:57]}..."
