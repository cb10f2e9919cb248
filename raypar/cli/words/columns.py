"""Text for a terminal: paragraphs wrapped at its width, and rows of two columns."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import groupby

from raypar.reporting.screen import fold

_ROW = re.compile(r"( *)(\S.*?) {2,}(\S.*)")  # words, two blanks or more, what they mean
_MOST, _LEAST = 120, 20  # characters of a line
_NARROW = 72
_WIDEST = 34  # a left column


def terminal_width() -> int:
    """Return how many characters a line may have, 80 where there is no terminal."""
    return min(_MOST, max(_LEAST, shutil.get_terminal_size().columns))


def fitted(text: str, width: int) -> str:
    """Wrap a text once: its lines with their indentation, and rows of two columns beside each other.

    Args:
        text: Lines of any length. A row has two columns that are two blanks or more apart.
        width: Characters of a line.
    """
    found = list[str]()
    for is_row, group in groupby(text.split("\n"), key=lambda line: _ROW.fullmatch(line) is not None):
        lines = [*group]
        found += _rows(lines, width) if is_row else [one for line in lines for one in fold(line, width, _hang(line))]
    return "\n".join(found)


def _hang(line: str) -> int:
    indent = len(line) - len(line.lstrip())
    return indent + 4 if indent else 0


def _rows(lines: Sequence[str], width: int) -> Iterator[str]:
    """Yield rows with the second column below the first one where that is too wide for both."""
    rows = [_ROW.fullmatch(line).groups() for line in lines]  # type: ignore[union-attr]
    longest = max(len(indent + left) for indent, left, _ in rows) + 2
    most = min(_WIDEST, width // 3)
    if longest > most:
        longest = most if width >= _NARROW else 6
    for indent, left, right in rows:
        begun = f"{indent}{left}  "
        if len(begun) > longest:
            yield begun.rstrip()
            begun = ""
        yield from fold(begun.ljust(longest) + right, width, longest)
