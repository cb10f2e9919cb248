"""Rows of which several are replicas of one pipeline rank: they hold the same stages and take microbatches in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from raypar.schedules.action import COMPUTE, Action

Rows = Sequence[Sequence[Action]]


def replicas_of(num_rows: int, holders: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return the number of replicas of each pipeline rank: of rows that hold the same stages. () if it is always one.

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
    """Return by stage which of its replicas takes microbatch 0, as most of its actions tell. () if all are first.

    Args:
        rows: The rows.
        holders: By stage, the rows that have it, in order.
    """
    told: dict[int, Counter[int]] = {stage: Counter() for stage in holders}
    for row, actions in enumerate(rows):
        for stage, op, microbatch, _ in actions:
            if op in COMPUTE and stage is not None and microbatch is not None:
                held = holders[stage]
                told[stage][(held.index(row) - microbatch) % len(held)] += 1
    most = {stage: max(sorted(turns), key=turns.__getitem__) for stage, turns in told.items() if turns}
    return tuple(most.get(stage, 0) for stage in range(len(holders))) if any(most.values()) else ()


def unlike_replicas(
    rows: Rows, holders: Mapping[int, Sequence[int]], replicas: Sequence[int], turns: Sequence[int]
) -> Iterator[str]:
    """Yield the stages of several rows that are no replicas of one rank, and what is not in its turn there.

    Args:
        rows: The rows.
        holders: By stage, the rows that have it, in order.
        replicas: What ``replicas_of`` returns for them.
        turns: What ``turns_of`` returns for them.
    """
    starts = [sum(replicas[:rank]) for rank in range(len(replicas))]
    found = {start: range(start, start + count) for start, count in zip(starts, replicas, strict=True)}
    for stage, held in holders.items():
        same, late = found.get(held[0], range(0)), ""
        if list(same) == list(held):
            turn, count = turns[stage] if stage < len(turns) else 0, len(held)
            every = (one for row in same for one in rows[row] if _is_late(one, stage, row - held[0] - turn, count))
            if (first := next(every, None)) is None:
                continue
            late = f": {first} belongs on rank {held[0] + ((first.microbatch or 0) + turn) % count}"
        elif len(held) == 1:
            yield f"stage {stage} is on rank {held[0]} only, whose other stages are on more: give it to all of them"
            continue
        yield (
            f"stage {stage} is on rank {held[0]} and on rank {held[1]}: give it to one of them, or to neighbours that "
            f"hold the same stages and take its microbatches in turn{late}"
        )


def _is_late(action: Action, stage: int, first: int, count: int) -> bool:
    """Return whether an action of a stage is not the turn of a replica.

    Args:
        action: The action.
        stage: The stage.
        first: A microbatch of the replica, which also takes each ``count``-th one before and after it.
        count: Number of replicas.
    """
    stands, op, microbatch, _ = action
    return stands == stage and op in COMPUTE and microbatch is not None and (microbatch - first) % count != 0
