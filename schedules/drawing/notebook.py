"""What notebooks show: small tables and texts as HTML, in a box that scrolls if it is too wide; errors as lines."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Iterable, Sequence
from html import escape

_BOX = "max-width: 100%; overflow-x: auto"
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
_CELL = "text-align: left; padding: 0 1em 0 0; white-space: normal"
_BROKEN = "display: grid; grid-template-columns: repeat(auto-fit, minmax(5em, 1fr))"  # a row in several lines
_NARROW = f"<style>@media (max-width: 40em) {{ .raypar-table tr {{ {_BROKEN} }} }}</style>"


def in_notebook() -> bool:
    """Return whether this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def box(*inside: str) -> str:
    """Return HTML in a box that is never wider than the page."""
    return f'<div style="{_BOX}">{"".join(inside)}</div>'


def text_block(text: str) -> str:
    """Return text as HTML with its line ends kept."""
    return f'<pre style="white-space: pre-wrap">{escape(text)}</pre>'


def notebook_table(rows: Iterable[Sequence[object]], heading: Sequence[str] = ()) -> str:
    """Return a table as HTML; every cell is escaped. On a narrow page its rows are broken.

    Args:
        rows: The cells of each row.
        heading: The names of the columns; none for a table without them.
    """
    lines = [_row("th", heading)] if heading else []
    inside = "".join([*lines, *(_row("td", row) for row in rows)])
    return f'<table class="raypar-table">{inside}</table>{_NARROW}'


def _row(kind: str, cells: Sequence[object]) -> str:
    inside = "".join(f'<{kind} style="{_CELL}">{escape(str(cell))}</{kind}>' for cell in cells)
    return f"<tr>{inside}</tr>"


def own_lines(error: BaseException) -> list[str]:
    """Return what IPython shows of an error: its text, its notes and the lines of cells, without a traceback.

    A class of errors has it as ``_render_traceback_``, which IPython asks for; outside of IPython nothing does.
    ``%debug`` still steps through all frames.
    """
    calls = [
        f"  in line {line}: {linecache.getline(frame.f_code.co_filename, line).strip()}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") == "__main__"  # cells are; raypar and IPython are not
    ]
    text = str(error)
    apart = "\n" if text.startswith("- ") else " "  # a list begins on a line of its own
    return [f"{_BOLD}{type(error).__name__}{_PLAIN}:{apart}{text}", *getattr(error, "__notes__", ()), *calls]
