"""The profiled steps of one actor in a file: a compressed Chrome trace, a line for each step. Imports no torch."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raypar.actors.machine.files import read_plain, sync_folder, write_whole

SUFFIX = ".json.gz"
MOST_BYTES = 1 << 30  # of a file, compressed
_MOST_PLAIN = 4 << 30  # bytes of the text in it
_LEVEL = 1  # of gzip: twice the size of level 9, in a twentieth of its time
_FLOW_PHASES = ("s", "t", "f")
Events = Sequence[Mapping[str, Any]]


def plain_trace(path: Path) -> bytes:
    """Return the JSON text of a file of this module.

    Raises:
        OSError: It can't be read, is no regular file, or is too large.
        ValueError: It is damaged.
    """
    try:
        unpacked = zlib.decompressobj(16 + zlib.MAX_WBITS)
        text = unpacked.decompress(read_plain(path, MOST_BYTES), _MOST_PLAIN)
    except zlib.error as error:
        raise ValueError(f"it is damaged: {error}") from error
    if not unpacked.eof:
        raise ValueError("it is damaged: it ends too early, or is too large")
    return text


def add_step(path: Path, head: Mapping[str, Any], step: int, events: Events) -> None:
    """Write the events of a step into an actor's file, after those of earlier steps.

    Those of the same step and of later ones are dropped: the run has gone back before them. A file that is damaged
    begins anew.

    Args:
        path: The file. Its folder is made.
        head: What the file says of all steps; ``baseTimeNanoseconds`` is the time from which ``ts`` counts.
        step: The step, counted from 1.
        events: Its events, with times in microseconds.

    Raises:
        OSError: It can't be written.
    """
    lines = {number: line for number, line in _lines(path, head).items() if number < step}
    lines[step] = json.dumps([_unique(event, step) for event in events])[1:-1]
    whole = json.dumps({**head, "steps": [*lines], "traceEvents": []}).removesuffix("]}")
    text = whole + "\n" + ",\n".join(lines.values()) + "\n]}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [memoryview(gzip.compress(text.encode(), _LEVEL))])
    sync_folder(path.parent)


def _lines(path: Path, head: Mapping[str, Any]) -> dict[int, str]:
    """Return the line of each step that a file has; none if it counts times from another moment, or is damaged."""
    try:
        first, *lines, last = plain_trace(path).decode().removesuffix("\n").split("\n")
        there = json.loads(first + last)
        same = there["baseTimeNanoseconds"] == head["baseTimeNanoseconds"]
        return dict(zip(there["steps"], (line.removesuffix(",") for line in lines), strict=True)) if same else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _unique(event: Mapping[str, Any], step: int) -> Mapping[str, Any]:
    """Return an event whose arrow, if it is an end of one, has a number that no other step has."""
    return {**event, "id": step << 32 | int(event["id"])} if event.get("ph") in _FLOW_PHASES else event
