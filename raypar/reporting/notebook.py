"""What notebooks show of a job, its reports and its ledger: small tables, in a box that scrolls if it is too wide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from raypar.actors.collective.ledger import LedgerEntry
from raypar.errors import UnknownNameError

_BOX = "max-width: 100%; overflow-x: auto"
_COUNTED = ("actor", "axis", "op", "calls", "bytes", "seconds")
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


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, each column as wide as its widest cell.

    Args:
        rows: The cells of each row, the heading first.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(kind: str, cells: Sequence[object]) -> str:
    inside = "".join(f'<{kind} style="{_CELL}">{escape(str(cell))}</{kind}>' for cell in cells)
    return f"<tr>{inside}</tr>"


def unknown_actor(actor: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error for an actor that a table does not have."""
    return UnknownNameError(f"no actor is called {actor!r}: there are {', '.join(known)}")


class Totals(dict[str, dict[tuple[str, str], LedgerEntry]]):
    """Communication totals: by actor, then by (axis, op), calls, bytes and seconds; a table in REPLs and notebooks."""

    def __repr__(self) -> str:
        return text_table([_COUNTED, *self._rows])

    def _repr_html_(self) -> str:
        return box(notebook_table(self._rows, _COUNTED))

    def __missing__(self, actor: str) -> dict[tuple[str, str], LedgerEntry]:
        raise unknown_actor(actor, self)

    @property
    def _rows(self) -> list[Sequence[str]]:
        return [
            (actor, axis, op, f"{entry.calls:,}", f"{entry.bytes:,}", f"{entry.seconds:.3f}")
            for actor, entries in self.items()
            for (axis, op), entry in entries.items()
        ]
