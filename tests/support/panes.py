"""A terminal in this process: what is printed to it, and the lines that a pane of so many columns shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from contextlib import contextmanager

_PIECES = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|(.)", re.DOTALL)


def shown(printed, columns):
    """The lines of a pane after all this was printed to it: line ends, cursor up, erased lines, and full lines."""
    rows, row, column = [[]], 0, 0
    for count, command, letter in _PIECES.findall(printed):
        if command == "A":
            row = max(0, row - int(count or 1))
        elif command == "K":
            rows[row] = [] if count == "2" else rows[row][:column]
        elif letter == "\r":
            column = 0
        elif letter == "\n":
            row += 1
        elif letter:
            row, column = (row + 1, 0) if column >= columns else (row, column)
        rows += [[] for _ in range(row + 1 - len(rows))]
        if letter and letter not in "\r\n":
            rows[row] += " " * (column + 1 - len(rows[row]))
            rows[row][column] = letter
            column += 1
    return ["".join(line).rstrip() for line in rows]


@contextmanager
def pane(monkeypatch, columns, encoding="utf-8", **environment):
    """Standard output and error are a terminal of so many columns in the block.

    Yields a function that returns all that was printed to it, after the block.
    """
    for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns), **environment}.items():
        monkeypatch.setenv(name, value)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    came, printed = bytearray(), []
    reader = threading.Thread(target=_read, args=(ours, came))
    reader.start()
    try:
        with os.fdopen(theirs, "w", 1, encoding, "backslashreplace") as terminal:
            monkeypatch.setattr(sys, "stdout", terminal)
            monkeypatch.setattr(sys, "stderr", terminal)
            yield lambda: printed[0]
    finally:
        monkeypatch.undo()
        reader.join()
        os.close(ours)
        printed.append(came.decode())


def _read(terminal, came):
    """Read until the last one that writes has closed it."""
    try:
        while piece := os.read(terminal, 1 << 16):
            came += piece
    except OSError:  # so Linux says that it is closed
        pass
