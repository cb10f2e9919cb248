"""Text cells in aligned columns, shared by the text drawing and the error messages."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from textwrap import wrap

from raypar.schedules.formatting import aligned
from raypar.schedules.schedule import Schedule

RANKS, ACTIONS = 8, 8  # the size of an excerpt of a larger schedule: ranks and actions
FITTING = 140  # characters: rows up to this length are shown whole
_TEXT = 24  # characters: the least width of a column of text


def padded(rows: Iterable[Sequence[str]], width: int) -> list[list[str]]:
    """Pad every cell with blanks to one width."""
    return [[f"{cell:<{width}}" for cell in row] for row in rows]


def widest(cells: Iterable[str]) -> int:
    """Return the length of the longest cell, 0 if there are none."""
    return max(map(len, cells), default=0)


def lines(labels: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format each row as one line: its label, then its cells."""
    margin = widest(labels)
    return [f"{label:<{margin}}  {' '.join(row)}".rstrip() for label, row in zip(labels, rows, strict=True)]


def lines_in_width(labels: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as ``lines`` does; on a terminal, columns that it has no room for follow below, with their labels.

    A label that leaves no room for any column is a line of its own, above its cells.

    Args:
        labels: The labels.
        rows: The cells of each row; those of a column have one length.
    """
    columns, first, found = len(rows[0]) if rows else 0, 0, list[str]()
    width = _columns()
    if columns and widest(labels) + 2 + widest(row[0] for row in rows) > width:
        pairs = zip(labels, rows, strict=True)
        return [line for label, row in pairs for line in (label, f"  {' '.join(row)}".rstrip()) if line]
    while first < columns:
        after = first + 1
        while (
            after < columns and widest(labels) + 1 + sum(len(cell) + 1 for cell in rows[0][first : after + 1]) <= width
        ):
            after += 1
        found += lines(labels, [row[first:after] for row in rows])
        first = after
    return found or lines(labels, rows)


def table_in_width(rows: Iterable[Sequence[str]]) -> list[str]:
    """Format a table as ``text_table`` does, on a terminal as ``lines_in_width``: the first column has the labels."""
    labels, *columns = zip(*aligned(rows), strict=True)
    return lines_in_width(labels, [*zip(*([f"{cell} " for cell in column] for column in columns), strict=True)])


def lines_with_texts(heads: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Put a text after each line; on a terminal texts are wrapped in their column, or below if that is too narrow.

    Args:
        heads: The lines, of one length.
        texts: A text for each of them.
    """
    width, margin = _columns(), widest(heads) + 2
    if width - margin < _TEXT:
        below = (wrap(text, width, initial_indent="    ", subsequent_indent="    ") for text in texts)
        return [line.rstrip() for head, text in zip(heads, below, strict=True) for line in (head, *text)]
    pairs = ((head, wrap(text, width - margin) or [""]) for head, text in zip(heads, texts, strict=True))
    return [f"{'' if at else head:<{margin}}{piece}".rstrip() for head, text in pairs for at, piece in enumerate(text)]


def _columns() -> int:
    """Return the columns of the terminal that standard output is; of a file or a pipe, as many as there may be."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def excerpt(
    schedule: Schedule,
    centre: tuple[int, int],
    marks: Collection[tuple[int, int]],
    among: Collection[int] | None = None,
    ranks: int = RANKS,
    actions: int = ACTIONS,
) -> str:
    """Draw the part of a schedule around one action: its rows, without bubbles.

    A schedule that is larger than the window is cut, and then the last line says which part is shown. Rows that fit on
    a line of FITTING characters are not cut.

    Args:
        schedule: The schedule.
        centre: ``(rank, index)`` of the action in the middle.
        marks: ``(rank, index)`` of the actions to put between ``>`` and ``<``.
        among: The ranks to show, or None for all.
        ranks: Height of the window, in ranks.
        actions: Width of the window, in actions.

    Returns:
        The text, of several lines.
    """
    longest = max(map(len, schedule.rows))
    cell = widest(f" >{action}<" for row in schedule.rows for action in row[:FITTING])
    if longest * cell <= FITTING:
        actions = longest
    chosen = sorted(among) if among else list(range(schedule.num_ranks))
    first_rank, last_rank = _window(chosen.index(centre[0]), ranks, len(chosen))
    chosen = chosen[first_rank:last_rank]
    first, last = _window(centre[1], actions, longest)
    labels, rows = [], []
    for rank in chosen:
        row = schedule.rows[rank]
        shown = range(first, min(last, len(row)))
        labels.append(f"{schedule.label(rank)}:{' ..' if first else ''}")
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
    """Return ``(start, end)`` of a window of ``size`` in ``whole``, with the centre in its middle if there is room."""
    start = max(0, min(centre - size // 2, whole - size))
    return start, min(whole, start + size)
