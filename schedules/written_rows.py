"""Rows as users write them: reading their actions, and the replicas, turns and skips that follow from them.

Rows that hold the same stages are replicas of one pipeline rank, and take microbatches in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import index
from typing import Any

from raypar.schedules.action import COMPUTE, Action, Op

Rows = Sequence[Sequence[Action]]

MOST_LISTED = 8


def read_rows(written: Any) -> tuple[tuple[Action, ...], ...]:
    """Read the rows of a schedule as a user may write them.

    Args:
        written: One row for each rank: a sequence of Actions, of texts like "1F0" or of triples like (1, "F", 0); or
            one text with blanks between the actions.

    Raises:
        ValueError: Some actions can't be read; the text names the first positions.
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
                f"row {rank}, action {position}: {fault}"
                for position, cell in enumerate(cells)
                for fault in _faults(cell)
            ]
    if faults:
        more = f"; and {len(faults) - MOST_LISTED} more" if len(faults) > MOST_LISTED else ""
        raise ValueError("; ".join(faults[:MOST_LISTED]) + more)
    return tuple(rows)


def number_faults(stages: Collection[int], last_microbatch: int, forwards: int, stream: int) -> Iterator[str]:
    """Yield the faults of the numbers of stages, microbatches and steps in rows.

    Args:
        stages: The stages in the rows.
        last_microbatch: The last microbatch in them; -1 if none.
        forwards: Number of their forwards.
        stream: Number of steps in them.
    """
    missing = [stage for stage in range(len(stages)) if stage not in stages]
    if missing:
        which = ", ".join(map(str, missing[:8]))
        yield f"stage {which} has no action on any rank: number the stages 0, 1, 2, ..."
    if last_microbatch >= forwards > 0:  # the check takes memory and time by their number
        only = f"{forwards} forward{'s' * (forwards != 1)}"
        which = f"microbatch {last_microbatch} is named, but the rows have only {only}"
        yield f"{which}: number the microbatches 0, 1, 2, ..."
    if stream and (stream > last_microbatch + 1 or (last_microbatch + 1) % stream):
        which = f"{last_microbatch + 1} microbatches are not {stream} steps of equal length"
        yield f"{which}: number the STEPs 0, 1, 2, ..., each of as many microbatches"
    if not stages:
        yield "the rows name no F, B, I or W: nothing would be computed"


def written_skips(rows: Iterable[Sequence[Action]]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of stages of the skips whose SENDs are in the rows, in order."""
    ends = ((one.stage or 0, one.peer) for row in rows for one in row if one.peer is not None)
    return tuple(sorted({(min(pair), max(pair)) for pair in ends}))


def _read(cell: Any) -> Action:
    """Read one action; its op may be a text, and its numbers may be numpy's. Raises ValueError."""
    if isinstance(cell, Action) and cell.op.__class__ is Op:
        return cell
    if isinstance(cell, str):
        return Action.parse(cell)
    try:
        stage, op, microbatch, *peers = cell
        numbers = [number if number is None else index(number) for number in (stage, microbatch, *peers)]
        action = Action(numbers[0], Op(op), *numbers[1:])
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


def replicas_of(num_rows: int, holders: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return the number of replicas of each pipeline rank, which are rows with the same stages; () if always one.

    Args:
        num_rows: Number of rows.
        holders: By stage, the rows that have it, in order.
    """
    if all(len(rows) == 1 for rows in holders.values()):
        return ()
    first = {row: rows[0] for rows in holders.values() for row in rows}
    starts = [row for row in range(num_rows) if first.get(row, row) == row]
    return tuple(end - start for start, end in pairwise([*starts, num_rows]))


def turns_of(rows: Rows, holders: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return by stage which of its replicas takes microbatch 0, by majority of its actions; () if always the first.

    Args:
        rows: The rows.
        holders: By stage, the rows that have it, in order.
    """
    counts: dict[int, Counter[int]] = {stage: Counter() for stage in holders}
    for row, actions in enumerate(rows):
        for stage, op, microbatch, _ in actions:
            if op in COMPUTE and stage is not None and microbatch is not None:
                held = holders[stage]
                counts[stage][(held.index(row) - microbatch) % len(held)] += 1
    turn_of = {stage: max(sorted(turns), key=turns.__getitem__) for stage, turns in counts.items() if turns}
    return tuple(turn_of.get(stage, 0) for stage in range(len(holders))) if any(turn_of.values()) else ()


def unlike_replicas(
    rows: Rows, holders: Mapping[int, Sequence[int]], replicas: Sequence[int], turns: Sequence[int]
) -> Iterator[str]:
    """Yield a fault for each stage in several rows that are no replicas of one rank, or that do not take turns.

    Args:
        rows: The rows.
        holders: By stage, the rows that have it, in order.
        replicas: The result of ``replicas_of`` for them.
        turns: The result of ``turns_of`` for them.
    """
    starts = [sum(replicas[:rank]) for rank in range(len(replicas))]
    found = {start: range(start, start + count) for start, count in zip(starts, replicas, strict=True)}
    for stage, held in holders.items():
        same, hint = found.get(held[0], range(0)), ""
        if list(same) == list(held):
            turn, count = turns[stage] if stage < len(turns) else 0, len(held)
            wrong = (
                one for row in same for one in rows[row] if _is_out_of_turn(one, stage, row - held[0] - turn, count)
            )
            if (first := next(wrong, None)) is None:
                continue
            hint = f": {first} belongs on rank {held[0] + ((first.microbatch or 0) + turn) % count}"
        elif len(held) == 1:
            yield f"stage {stage} is on rank {held[0]} only, whose other stages are on more: give it to all of them"
            continue
        yield (
            f"stage {stage} is on rank {held[0]} and on rank {held[1]}: give it to one of them, or to neighbours that "
            f"hold the same stages and take its microbatches in turn{hint}"
        )


def _is_out_of_turn(action: Action, stage: int, first: int, count: int) -> bool:
    """Return whether a replica has an action of a stage that is another replica's turn.

    Args:
        action: The action.
        stage: The stage.
        first: A microbatch of the replica, which also has each ``count``-th one before and after it.
        count: Number of replicas.
    """
    own, op, microbatch, _ = action
    return own == stage and op in COMPUTE and microbatch is not None and (microbatch - first) % count != 0
