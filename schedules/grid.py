"""Cells under one another: the text that the drawing and the error messages share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from raypar.schedules.schedule import Schedule


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
    schedule: Schedule, centre: tuple[int, int], marks: Collection[tuple[int, int]], ranks: int = 8, places: int = 8
) -> str:
    """The rows around a place ``(rank, index)`` as they are written, without bubbles.

    The marked actions stand between ``>`` and ``<``. A schedule that is larger than the window of so many ranks and
    places is cut, and the last line says so.
    """
    longest = max(map(len, schedule.rows))
    first_rank, last_rank = _window(centre[0], ranks, schedule.num_ranks)
    first, last = _window(centre[1], places, longest)
    labels, rows = [], []
    for rank in range(first_rank, last_rank):
        row = schedule.rows[rank]
        shown = range(first, min(last, len(row)))
        labels.append(f"rank {rank}:{' ..' if first else ''}")
        rows.append([f">{row[index]}<" if (rank, index) in marks else f" {row[index]}" for index in shown])
        if last < len(row):
            rows[-1].append(" ..")
    text = lines(labels, padded(rows, widest(cell for row in rows for cell in row)))
    if last_rank - first_rank < schedule.num_ranks or last - first < longest:
        text.append(f"(ranks {first_rank} to {last_rank - 1} of {schedule.num_ranks}, actions {first} to {last - 1})")
    return "\n".join(text)


def _window(centre: int, size: int, whole: int) -> tuple[int, int]:
    """A stretch of ``size`` of the whole, with the centre in its middle where there is room on both sides."""
    start = max(0, min(centre - size // 2, whole - size))
    return start, min(whole, start + size)
