"""A recording of a terminal as SVG, in which lines appear as they did, without long pauses."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import time
from codecs import getincrementaldecoder
from copy import copy
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.color_triplet import ColorTriplet
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

_STYLE = Path(__file__).with_name("terminal.css")
_PAUSE = 0.5  # seconds that the recording waits at most between two lines
_COLUMNS, _ROWS = 100, 40
_CUT = re.compile(r"(?:\x1b(?:\[[\d;?]*)?)?$")  # a sequence whose end is not read yet
_MOVES = re.compile(r"\x1b\[(\d*)([ABKJ])|\x1b\[\?\d+[hl]|(\r)|(\n)")


class Screen:
    """Lines of a terminal with their colours, and when each was written last, in seconds."""

    def __init__(self) -> None:
        self.lines: list[str] = [""]
        self.written: list[float] = [0.0]
        self._row = 0
        self._is_at_start = True

    def write(self, text: str, seconds: float) -> None:
        """Take what a program wrote: texts, line ends, and what rich moves the cursor with."""
        start = 0
        for move in _MOVES.finditer(text):
            self._put(text[start : move.start()], seconds)
            self._move(move)
            start = move.end()
        self._put(text[start:], seconds)

    def _put(self, text: str, seconds: float) -> None:
        if text:
            self.lines[self._row] = text if self._is_at_start else self.lines[self._row] + text
            self.written[self._row] = seconds
            self._is_at_start = False

    def _move(self, move: re.Match[str]) -> None:
        if move[3] or move[4]:
            self._is_at_start = True
        if move[4]:
            self._row += 1
        if move[2] == "A":
            self._row = max(0, self._row - int(move[1] or 1))
        if move[2] in ("K", "J"):
            self.lines[self._row] = ""
        while len(self.lines) <= self._row:
            self.lines.append("")
            self.written.append(self.written[-1])


def run_in_terminal(words: list[str], folder: str) -> Screen:
    """Run a program in a folder and a terminal of 100 columns, and return what it has written."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    started, screen, pending, decode = time.monotonic(), Screen(), "", getincrementaldecoder("utf-8")("replace").decode
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=folder) as running:
        os.close(theirs)
        while chunk := _read(ours):
            text = pending + decode(chunk)
            pending = _CUT.search(text)[0]
            screen.write(text.removesuffix(pending), time.monotonic() - started)
    os.close(ours)
    if running.returncode:
        raise RuntimeError(f"{shlex.join(words)} ended with {running.returncode}:\n" + "\n".join(screen.lines))
    return screen


def _read(file: int) -> bytes:
    try:
        return os.read(file, 65536)
    except OSError:  # the program has ended
        return b""


def recorded(command: str) -> str:
    """Run a command line of raypar, and return its recording.

    Args:
        command: Such as ``raypar train gpt-tiny``; the Python of this process runs it.
    """
    with TemporaryDirectory() as folder:
        screen = run_in_terminal([sys.executable, "-m", *shlex.split(command)], folder)
    return drawn(command, screen)


def drawn(command: str, screen: Screen) -> str:
    """Return a screen as SVG, below the command that was typed."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    typed = [(Text(f"$ {command}", style="bold"), 0.0)]
    written = [(Text.from_ansi(line), at) for line, at in zip(screen.lines, screen.written, strict=True)]
    rows = [(row, at) for text, at in typed + written for row in text.wrap(console, _COLUMNS)]
    while not rows[-1][0]:
        rows.pop()
    console.print(*(row for row, _ in rows), sep="\n")
    theme = copy(SVG_EXPORT_THEME)
    theme.background_color = ColorTriplet(0, 0, 0)  # on which raypar's colours have a contrast of 4.5:1
    picture = console.export_svg(title="raypar", unique_id="terminal", theme=theme)
    shown = _without_pauses(screen.written)
    delays = "".join(
        f'[clip-path$="-line-{number})"] {{ animation-delay: {shown[at]:.2f}s }}\n'
        for number, (_, at) in enumerate(rows)
    )
    local = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # fonts from a network
    return local.replace("</style>", f"{_STYLE.read_text()}{delays}</style>", 1)


def _without_pauses(written: list[float]) -> dict[float, float]:
    """When the recording shows what was written at each time, in seconds."""
    shown = {0.0: 0.0}
    for before, now in pairwise(sorted({0.0, *written})):
        shown[now] = shown[before] + min(now - before, _PAUSE)
    return shown
