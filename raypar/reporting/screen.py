"""The screen of a command or a script: lines wrap at words, and colours contrast with black and with white."""

from __future__ import annotations

import logging
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Colours of the 256 that have a contrast of 4.5:1 at least on black, and on white; few do.
STYLES: Mapping[str, str] = MappingProxyType(
    {
        "ok": "color(29)",
        "note": "color(98)",
        "error": "color(131)",
        "figure": "color(63)",
        "name": "color(243)",
        "progress.elapsed": "color(243)",
    }
)
_WORDS = {  # how lines begin, or what is in them, by its style
    "ok": r"^(ok|identical)\b",
    "note": r"^(note|slow)\b",
    "error": r"^(raypar:|wrong\b|danger\b)|\bTOO MUCH\b",
}
_FIGURE = re.compile(r"(?:about )?-?\d\S*(?: \d\S*)*(?: (?:[kmnµ]?s|[KMGT]iB|\S+/s)\b)?")  # with its unit
_UNIT = re.compile(r"(?<=\d) (?=(?:[kmnµ]?s|[kMGT]?B|[kMGT]|[KMGT]iB|\w+/s|left)\b)")  # the space before a unit
_COMMAND = re.compile(r"\braypar [a-z]+(?: [\w./-]+)??(?: --\S+(?: [^\s(-]\S*)?)+")
_COLUMNS = re.compile(r" *(?:\S+(?: \S+)* {2,})*")
_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")  # between two columns
_JOINT = "\ue000"  # in place of a space at which no line may end; no text has it
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and line ends
_COLORS = re.compile(r"\x1b\[[\d;]*m")
_SENTENCE = re.compile(r"\(?\w[^\x1b]* [^\x1b]*")  # a line that is no data for programs, and has no colours
_NAMES = 22  # characters of the names of rows
_NARROW = 60  # columns from which on figures are below each other


class PathFigure(str):
    """A row's figure that is a path or a command, to be copied whole: no line ends within it."""

    __slots__ = ()


def printable(text: str) -> str:
    """Return a text with its control characters, which may be commands to a terminal, spelled: a name may have some."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def console_of(file: TextIO) -> Console | None:
    """Return the console of a terminal; None for a file or a pipe, which get plain text.

    Args:
        file: Where it writes to.
    """
    if not file.isatty():
        return None
    from rich.console import Console  # takes 50 ms to import
    from rich.theme import Theme

    console = Console(file=file, highlight=False, markup=False, emoji=False, theme=Theme(STYLES))
    if console.is_dumb_terminal:  # of which rich takes 80 columns for granted
        console.size = shutil.get_terminal_size()
    console.no_color |= console.color_system not in ("256", "truecolor")  # of 16 colours nobody knows the contrast
    return console


def in_colors(file: TextIO) -> bool:
    """Return whether what is written to a file may have colours: on a terminal that has them, without NO_COLOR."""
    console = console_of(file)
    return console is not None and console.color_system is not None and not console.no_color


def without_colors(text: str) -> str:
    """Return a text without ANSI escapes for colours."""
    return _COLORS.sub("", text)


def folded_below(picture: str, console: Console) -> str:
    """Return a picture for a terminal, and the sentences below it on lines that end between words."""
    lines = picture.split("\n")
    return "\n".join(
        piece for line in lines for piece in (fold(line, console.width, 2) if _SENTENCE.fullmatch(line) else [line])
    )


def show_text(console: Console, text: str, style: str = "") -> None:
    """Print a text to a terminal; lines end between words. JSON, which a program may read, stays as it is.

    Args:
        console: The terminal's.
        text: The text, which has no control characters.
        style: The style of all of it; "" for those of its words.
    """
    lines = [text] if text.startswith(("{", "[")) else _wrapped(text.split("\n"), console.width)
    _print(console, lines, style)


def show_rows(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Print rows of a name and a figure to a terminal, as ``plain_rows`` has them, wrapped at words."""
    from rich.text import Text

    names, hang = (_NAMES, _NAMES + 1) if console.width >= _NARROW else (0, 2)
    for name, figure in rows:
        label, said = f"{name + ':':<{names}} ", printable(figure)
        is_path = isinstance(figure, PathFigure)
        lines = [label.rstrip(), said] if is_path else fold(label + said, console.width, hang)
        lines = [label + said] if len(label + said) <= console.width else lines
        shown = Text("\n".join(lines))
        shown.stylize("name", 0, len(name) + 1)
        if (key := _FIGURE.match(said)) and not is_path:
            shown.stylize("figure", len(label), len(label) + key.end())
        _highlighted(shown)
        console.print(shown, soft_wrap=True)


def plain_rows(rows: Iterable[tuple[str, str]]) -> str:
    """Return rows of a name and a figure as lines for a file or a pipe."""
    return "\n".join(f"{name + ':':<{_NAMES}} {printable(figure)}" for name, figure in rows)


def _print(console: Console, lines: Sequence[str], style: str) -> None:
    from rich.text import Text

    shown = Text("\n".join(lines), style)
    console.print(shown if style else _highlighted(shown), soft_wrap=True)


def _highlighted(text: object) -> object:
    """Give a rich Text the styles of its words."""
    for style, words in _WORDS.items():
        text.highlight_regex(re.compile(words, re.MULTILINE), style)  # type: ignore[attr-defined]
    return text


def _wrapped(lines: Iterable[str], width: int) -> list[str]:
    """Return lines of a width, the further ones of each indented: below its last column, if it begins with columns."""
    hangs = ((line, _COLUMNS.match(line[:_NAMES])) for line in lines)
    return [piece for line, found in hangs for piece in fold(line, width, max(2, found.end() if found else 0))]


def fold(line: str, width: int, hang: int) -> list[str]:
    """Divide a line between words; a word that is too long, such as a path, is left whole, and so are figures with
    their units, and commands that are not long, to be copied.

    Args:
        line: The line.
        width: The most characters of each piece.
        hang: Spaces before all but the first.

    Returns:
        The pieces. Columns whose last ones fit whole below the others are divided only there.
    """
    if len(line) <= width:
        return [line]
    for gap in reversed([*_GAP.finditer(line)]):
        below = " " * hang + line[gap.end() :]
        if gap.start() <= width and len(below) <= width:
            return [line[: gap.start()], below]
    wrapper = textwrap.TextWrapper(
        width,
        subsequent_indent=" " * min(hang, width // 2),
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    whole = max(width, _NARROW)
    joined = _COMMAND.sub(
        lambda found: found[0] if len(found[0]) > whole else found[0].replace(" ", _JOINT), _UNIT.sub(_JOINT, line)
    )
    return [piece.replace(_JOINT, " ") for piece in wrapper.wrap(joined)]


class ScreenHandler(logging.StreamHandler[TextIO]):
    """Prints log messages to standard error.

    On a terminal a message may be shorter than in a file, or left out: its record says so (``raypar.log_details``).

    Args:
        stream: Where it prints instead.
        verbose: Whether a terminal gets all messages whole.

    Attributes:
        console: The terminal's; None if that is none.
    """

    def __init__(self, stream: TextIO | None = None, *, verbose: bool = False) -> None:
        super().__init__(stream)
        self.console, self._verbose = console_of(self.stream), verbose

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record, without control characters."""
        return printable(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        if self.console is None:
            super().emit(record)
            return
        try:
            brief = None if self._verbose else getattr(record, "brief", None)
            text = self.format(record) if brief is None else printable(brief)
            if text:
                show_text(self.console, text, "note" if record.levelno == logging.WARNING else "")
        except Exception:  # as any handler of logging
            self.handleError(record)


def error_console() -> Console | None:
    """Return the console of standard error, with which messages are printed; None if that is no terminal."""
    handlers: Iterator[logging.Handler] = iter(logging.getLogger("raypar").handlers)
    found = next((one.console for one in handlers if isinstance(one, ScreenHandler) and one.console), None)
    return found or console_of(sys.stderr)
