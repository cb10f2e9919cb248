"""Insertion of further actions into a row, between its compute actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from raypar.schedules.action import COMPUTE, SENDS, Action


def with_inserted(
    row: Sequence[Action], after: Mapping[int, Sequence[Action]], before: Mapping[int, Sequence[Action]]
) -> Iterator[Action]:
    """Yield a row with further actions, each between a compute action with its SENDs and the next compute action.

    Args:
        row: The row.
        after: The actions after each compute action and its SENDs, by the number of that action; 0 is the first one.
        before: The actions before each compute action, after the SENDs of the previous one.
    """

    def boundary(at: int) -> Iterator[Action]:
        yield from after.get(at, ())
        yield from before.get(at + 1, ())

    at, written = -1, False
    for action in row:
        if not written and action.op not in SENDS:
            yield from boundary(at)
            written = True
        yield action
        if action.op in COMPUTE:
            at, written = at + 1, False
    if not written:
        yield from boundary(at)
