"""The logs of Ray's worker processes on this node: the last lines that an actor wrote."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from raypar.cluster.ray_private import logs_folder

_LINES = 12  # lines of a log in an error message
_MOST = 1 << 16  # bytes at the end of a log that are read
_LONGEST = 300  # characters of a line

_RAYS_OWN = re.compile(r":(?:job_id|actor_name|task_name):|\[[^]]*\] [\w.]+:\d+: |Extension modules: |\s*@ |PC: @|\s*$")
_CRASHED = "Fatal Python error"  # the head of the stack of a crash in native code, its innermost frame first


def log_of(number: int | None) -> tuple[str, str]:
    """Return the log file of an actor of this node, and the end of its text; "" and "" if there is none.

    Args:
        number: The pid of the actor's process; None if it is not known to be on this node.
    """
    folder = None if number is None else logs_folder()
    if folder is None:
        return "", ""
    for kind in ("err", "out"):
        with suppress(OSError):
            files = sorted(folder.glob(f"worker-*-{number}.{kind}"), key=lambda file: file.stat().st_mtime)
            text = _end_of(files[-1]) if files else ""
            if shown(text):
                return str(files[-1]), text
    return "", ""


def shown(text: str) -> tuple[str, ...]:
    """Return the last lines of a log that the program wrote; for a crash the first lines of its stack."""
    lines = [line[:_LONGEST] for line in text.splitlines() if not _RAYS_OWN.match(line)]
    crash = next((at for at, line in enumerate(lines) if line.startswith(_CRASHED)), None)
    return tuple(lines[-_LINES:] if crash is None else lines[crash : crash + _LINES])


def _end_of(file: Path) -> str:
    """Return the last ``_MOST`` bytes of a file as a text. Raises OSError."""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - _MOST))
        return opened.read(_MOST).decode(errors="replace")
