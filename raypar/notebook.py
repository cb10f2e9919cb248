"""Small tables and texts as HTML for notebooks, in a box that scrolls if it is too wide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_BOX = "max-width: 100%; overflow-x: auto"
_CELL = "text-align: left; padding: 0 1em 0 0; white-space: nowrap"


def box(*inside: str) -> str:
    """Return HTML in a box that is never wider than the page."""
    return f'<div style="{_BOX}">{"".join(inside)}</div>'


def text_block(text: str) -> str:
    """Return text as HTML with its line ends kept."""
    return f'<pre style="white-space: pre-wrap">{escape(text)}</pre>'


def notebook_table(rows: Iterable[Sequence[object]], heading: Sequence[str] = ()) -> str:
    """Return a table as HTML; every cell is escaped.

    Args:
        rows: The cells of each row.
        heading: The names of the columns; none for a table without them.
    """
    lines = [_row("th", heading)] if heading else []
    return f"<table>{''.join([*lines, *(_row('td', row) for row in rows)])}</table>"


def _row(kind: str, cells: Sequence[object]) -> str:
    inside = "".join(f'<{kind} style="{_CELL}">{escape(str(cell))}</{kind}>' for cell in cells)
    return f"<tr>{inside}</tr>"
