"""Cells under one another: the text that the drawing and the error messages share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from raypar.schedules.schedule import Schedule

RANKS, PLACES = 8, 8  # of a schedule that is too large to show
FITTING = 140  # characters of a line that is not too long


def padded(rows: Iterable[Sequence[str]], width: int) -> list[list[str]]:
    """The cells, filled up with blanks to one width."""
    return [[f"{cell:<{width}}" for cell in row] for row in rows]


def widest(cells: Iterable[str]) -> int:
    return max(map(len, cells), default=0)


def lines(labels: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """One line a row: its label, then its cells."""
    margin = widest(labels)
    return [f"{label:<{margin}}  {' '.join(row)}".rstrip() for label, row in zip(labels, rows, strict=True)]


def excerpt(
    schedule: Schedule,
    centre: tuple[int, int],
    marks: Collection[tuple[int, int]],
    among: Collection[int] | None = None,
    ranks: int = RANKS,
    places: int = PLACES,
) -> str:
    """The rows around a place ``(rank, index)`` as they are written, without bubbles.

    The marked actions stand between ``>`` and ``<``. ``among`` are the ranks that matter, None for all. A schedule
    that is larger than the window of so many ranks and places is cut, and the last line says so; rows that fit into
    a line are not.
    """
    longest = max(map(len, schedule.rows))
    cell = widest(f" >{action}<" for row in schedule.rows for action in row[:FITTING])
    if longest * cell <= FITTING:
        places = longest
    chosen = sorted(among) if among else list(range(schedule.num_ranks))
    first_rank, last_rank = _window(chosen.index(centre[0]), ranks, len(chosen))
    chosen = chosen[first_rank:last_rank]
    first, last = _window(centre[1], places, longest)
    labels, rows = [], []
    for rank in chosen:
        row = schedule.rows[rank]
        shown = range(first, min(last, len(row)))
        labels.append(f"rank {rank}:{' ..' if first else ''}")
        rows.append([f">{row[index]}<" if (rank, index) in marks else f" {row[index]}" for index in shown])
        if last < len(row):
            rows[-1].append(" ..")
    text = lines(labels, padded(rows, widest(cell for row in rows for cell in row)))
    if len(chosen) < schedule.num_ranks or last - first < longest:
        text.append(f"({_spelled(chosen)} of {schedule.num_ranks}, actions {first} to {last - 1})")
    return "\n".join(text)


def _spelled(ranks: Sequence[int]) -> str:
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def _window(centre: int, size: int, whole: int) -> tuple[int, int]:
    """A stretch of ``size`` of the whole, with the centre in its middle where there is room on both sides."""
    start = max(0, min(centre - size // 2, whole - size))
    return start, min(whole, start + size)


MOST_SHOWN = 10


def first_of(faults: Iterable[str], most: int = MOST_SHOWN) -> list[str]:
    """The first faults, and how many more there are; [] if there are none."""
    every = iter(faults)
    first = list(islice(every, most))
    more = sum(1 for _ in every)
    return [*first, f"... and {more} more"] if more else first
