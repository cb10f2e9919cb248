"""Tables as text and as Markdown, and their place in docs/benchmarks.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_BLOCK = re.compile(r"(<!-- bench -->\n).*?(<!-- /bench -->)", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """A title, a header, and rows of as many cells.

    notes  sentences below it
    words  headings of further columns to the left, besides the first: their cells are words, not figures
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    words: Sequence[str] = ()

    def text(self) -> str:
        """Columns under one another: words to the left, figures to the right."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        drawn = [
            "  ".join(
                cell.ljust(width) if is_left else cell.rjust(width)
                for is_left, cell, width in zip(self._is_left(), line, widths, strict=True)
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *drawn, *self.notes])

    def markdown(self) -> str:
        """The same for docs/benchmarks.md."""
        ruler = ["---" if is_left else "--:" for is_left in self._is_left()]
        drawn = [f"| {' | '.join(line)} |" for line in (self.header, ruler, *self.rows)]
        return "\n\n".join([self.title, "\n".join(drawn), *([" ".join(self.notes)] if self.notes else [])])

    def _is_left(self) -> list[bool]:
        """Whether each column is to the left."""
        return [column == 0 or name in self.words for column, name in enumerate(self.header)]


def write_block(page: str, markdown: str) -> str:
    """A page with what stands between ``<!-- bench -->`` and ``<!-- /bench -->`` replaced.

    Raises ValueError if the page has no such block, or more than one.
    """
    if len(_BLOCK.findall(page)) != 1:
        raise ValueError("the page needs one block <!-- bench -->, <!-- /bench -->, each on a line of its own")
    return _BLOCK.sub(lambda block: f"{block[1]}{markdown.strip()}\n{block[2]}", page)
