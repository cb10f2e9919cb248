"""Check that a folder holds a run of raypar and nothing else, before another run replaces it."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from raypar.config.fields import short_repr
from raypar.paths import CHECKPOINTS, COMPARISON, LOG, REPORT, RUN, RUN_FILES, TENSORBOARD, TRACE, is_aside, step_of

_UNFINISHED = re.compile(r"\.[0-9a-f]{32}")  # what a WholeFile leaves if its process is killed
_EVENTS = re.compile(r"events\.out\.tfevents\..*")
_SHARDS = re.compile(r"manifest\.json|.*\.safetensors")
_PLANNED = re.compile(rb"^\S+ INFO actors: \d+", re.MULTILINE)  # in every log, when a launch begins
_MOST_READ = 1 << 16  # bytes of a log
_HEAD = b"# The run with all its defaults, for raypar train"  # with which run.toml begins


def replacing_faults(path: Path) -> Iterator[str]:
    """Yield the reasons why another run must not replace the content of a folder.

    Args:
        path: The folder, which is there.

    Raises:
        OSError: It can't be read.
    """
    if path.is_symlink():
        yield "is a symbolic link, and raypar removes nothing through one: give the folder itself"
        return
    there = sorted(os.listdir(path))  # noqa: PTH208  (names, not paths)
    if not there:
        return
    if is_under_way(path):
        yield "is that of a run that is under way: end that one first, or give another folder"
        return
    if RUN not in there and _was_begun(path, there):
        return
    if RUN not in there or not _is_plain(path / RUN) or not (path / RUN).read_bytes().startswith(_HEAD):
        yield f"is no run folder of raypar (it has no {RUN} that raypar wrote): give another folder"
        return
    strangers = [name for name in there if not _is_ours(path / name)]
    if strangers:
        yield f"has {short_repr(strangers[0])} in it, which no run has written: move it away, or give another folder"


def is_under_way(path: Path) -> bool:
    """Return whether a run writes to a folder now. Raises OSError if its log can't be read."""
    log = path / LOG
    return os.path.lexists(log) and _is_plain(log) and _is_locked(log)


def _was_begun(path: Path, there: Sequence[str]) -> bool:
    """Return whether a folder holds only the files of a launch that ended before its run began."""
    if LOG not in there or set(there) - {LOG, CHECKPOINTS} or not all(_is_ours(path / name) for name in there):
        return False
    saved = [one.name for one in (path / CHECKPOINTS).iterdir()] if CHECKPOINTS in there else []
    return saved in ([], [".lock"]) and bool(_PLANNED.search((path / LOG).read_bytes()[:_MOST_READ]))


def _is_ours(path: Path) -> bool:
    """Return whether a run has written this entry of its folder."""
    if path.name == CHECKPOINTS:
        return _is_folder(path) and all(
            ((step_of(saved.name) is not None or is_aside(saved.name)) and _holds_only(saved, _SHARDS))
            or (saved.name == ".lock" and _is_plain(saved))
            for saved in path.iterdir()
        )
    if path.name == TENSORBOARD:
        return _holds_only(path, _EVENTS)
    known = path.name in (*RUN_FILES, COMPARISON, REPORT, TRACE) or _UNFINISHED.fullmatch(path.name)
    return bool(known) and _is_plain(path)


def _holds_only(folder: Path, names: re.Pattern[str]) -> bool:
    return _is_folder(folder) and all(
        (names.fullmatch(path.name) or _UNFINISHED.fullmatch(path.name)) and _is_plain(path)
        for path in folder.iterdir()
    )


def _is_plain(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def _is_locked(path: Path) -> bool:
    """Return whether another process writes to a log."""
    with path.open("rb") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
