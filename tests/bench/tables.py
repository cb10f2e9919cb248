"""Tables as text and as Markdown, and their place in docs/benchmarks.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_BLOCK = re.compile(r"(<!-- bench -->\n).*?(<!-- /bench -->)", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """A title, a header, and rows of as many cells; ``notes`` are sentences below it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Columns under one another: the first to the left, figures to the right."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        drawn = [
            "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *drawn, *self.notes])

    def markdown(self) -> str:
        """The same for docs/benchmarks.md."""
        ruler = ["---", *["--:"] * (len(self.header) - 1)]
        drawn = [f"| {' | '.join(line)} |" for line in (self.header, ruler, *self.rows)]
        return "\n\n".join([self.title, "\n".join(drawn), *([" ".join(self.notes)] if self.notes else [])])


def write_block(page: str, markdown: str) -> str:
    """A page with what stands between ``<!-- bench -->`` and ``<!-- /bench -->`` replaced.

    Raises ValueError if the page has no such block, or more than one.
    """
    if len(_BLOCK.findall(page)) != 1:
        raise ValueError("the page needs one block <!-- bench -->, <!-- /bench -->, each on a line of its own")
    return _BLOCK.sub(lambda block: f"{block[1]}{markdown.strip()}\n{block[2]}", page)
