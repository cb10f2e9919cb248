"""Check a run's folder, what another run may replace in it, and trackers, before the run starts."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path
from shlex import quote

from raypar.actors.specs.types import Tracker
from raypar.config.fields import short_repr
from raypar.config.rules import Conflict, Examined, RunRule, RunSetting
from raypar.paths import (
    AUTO,
    CHECKPOINTS,
    COMPARISON,
    LOG,
    METRICS,
    MOST_METRICS,
    PROFILED_TIMES,
    PROFILES,
    REPORT,
    RUN,
    RUN_FILES,
    RUNS,
    TENSORBOARD,
    TRACE,
    TRAINING_FILES,
    absolute,
    checkpoints,
    holds_run,
    is_aside,
    run_folder_of,
    step_of,
)

_PACKAGES: dict[Tracker, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}")  # what a WholeFile leaves if its process is killed
_FOLDERS = {
    TENSORBOARD: re.compile(r"events\.out\.tfevents\..*"),
    PROFILES: re.compile(rf".*\.json\.gz|{PROFILED_TIMES}"),
}
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
    if not os.path.lexists(log) or not _is_plain(log):
        return False
    file = os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


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
    if path.name in _FOLDERS:
        return _holds_only(path, _FOLDERS[path.name])
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


def _track_faults(examined: Examined) -> Iterator[str]:
    """Yield the reasons why trackers cannot be used."""
    track = examined.run.track
    for name in track:
        package = _PACKAGES.get(name)
        if package is not None and package not in sys.modules and not _installed(package):
            yield f"track has {name!r}, but there is no package {package}: pip install {package}"
    if "tensorboard" in track and examined.run.folder is None:
        yield "track has 'tensorboard', which writes into the run's folder: give a folder"


def _installed(package: str) -> bool:
    """Return whether a package is installed. A mere folder of this name does not count; W&B leaves one."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


def run_folder_faults(folder: str, resumed: Path | None, *, overwrite: bool = False) -> Iterator[str]:
    """Yield the reasons why a run cannot use a folder.

    Args:
        folder: The run's folder; "auto" is a new one below runs/.
        resumed: Path of the checkpoint that the run continues from; None for a new run.
        overwrite: Whether the run replaces one that is in the folder.
    """
    if folder == AUTO:
        folder = f"{RUNS}/new"
        while os.path.lexists(folder):
            folder += "-new"
    if not folder.strip():
        yield f"folder {folder!r} has no name: give it one, or leave it out"
        return
    try:
        yield from (f"folder {folder!r} {fault}" for fault in _faults(folder, resumed, overwrite))
    except (OSError, RuntimeError, ValueError) as error:
        yield f"folder {folder!r} can't be used ({getattr(error, 'strerror', None) or error}): give another path"


def _faults(folder: str, resumed: Path | None, overwrite: bool) -> Iterator[str]:
    path = absolute(folder)
    line = (*reversed(path.parents), path)
    new = list(dropwhile(os.path.lexists, line))
    for name in dict.fromkeys([*(step.name for step in new), path.name]):
        if not _NAME.fullmatch(name):
            yield f"has {short_repr(name)} in it: use up to 100 letters, digits, '.', '_' and '-', and no leading dot"
    other = next((above.parent for above in line if above.name == CHECKPOINTS and holds_run(above.parent)), None)
    if other is not None:
        yield f"is in the folder of the checkpoints of another run, {str(other)!r}: give a folder outside it"
    above = new[0].parent if new else path
    if not above.is_dir():
        yield f"can't be made: {str(above)!r} is no folder: give another path"
    elif not os.statvfs(above).f_blocks:
        yield f"can't be made: {str(above)!r} is on no disk: give another path"
    elif not os.access(above, os.W_OK | os.X_OK):
        yield f"can't be written: there is no permission for {str(above)!r}: give another path"
    if not new:
        yield from _file_faults(path)
    if not new and overwrite:
        if _holds_resumed(path, resumed):
            yield "holds the checkpoint to resume from: leave overwrite out, or give another folder"
        yield from replacing_faults(path)
    elif not new and not _holds_resumed(path, resumed):
        taken = [name for name in TRAINING_FILES if os.path.lexists(path / name)]
        if taken and is_under_way(path):
            yield "holds a run that is under way: end that one first, or give another folder"
        elif taken:
            fix = "replace it with --overwrite (overwrite=True), or give another folder"
            if (path / CHECKPOINTS).is_dir() and checkpoints(path / CHECKPOINTS):
                go_on = f"raypar train --resume {quote(folder)} (in Python launch(run, resume={folder!r}))"
                fix = f"go on with it by {go_on}, {fix}"
            yield f"holds a run already ({taken[0]}): {fix}"


def _file_faults(path: Path) -> Iterator[str]:
    """Yield the files of a run in a folder that can't be written or appended to."""
    for name in (*RUN_FILES, CHECKPOINTS, PROFILES):
        there, fix = path / name, "remove it, or give another folder"
        if there.is_symlink():
            yield f"has a symbolic link {name}, and raypar writes through none: {fix}"
        elif there.exists() and not (there.is_file() if name in RUN_FILES else there.is_dir()):
            yield f"has {name}, which is no {'plain file' if name in RUN_FILES else 'folder'}: {fix}"
        elif name == METRICS and there.exists() and there.stat().st_size > MOST_METRICS:
            yield f"has {name} of more than {MOST_METRICS >> 30} GiB, which a run can't go on from: move it away"


def _holds_resumed(path: Path, resumed: Path | None) -> bool:
    """Return whether the checkpoint to continue from is in this run folder."""
    folder = None if resumed is None else run_folder_of(resumed)
    return folder is not None and folder.resolve() == path.resolve()


def _folder_faults(examined: Examined) -> Iterator[str]:
    """Yield the reasons why a run cannot use its folder."""
    if (folder := examined.run.folder) is not None:
        yield from run_folder_faults(folder, examined.resumed, overwrite=examined.overwrite)


def _profile_faults(examined: Examined) -> Iterator[str]:
    """Yield the reasons why the steps that are to be profiled are no steps of the run."""
    if (steps := examined.run.profile) is None:
        return
    (first, last), most = steps, examined.run.steps
    if first > last:
        yield f"profile is {steps}, but its first step comes after its last one: give {last}:{first}, ({last}, {first})"
    if max(steps) > most:
        fix = f"end with step {most}" if min(steps) <= most else f"profile some of the steps 1 to {most}"
        yield f"profile is {steps}, but the run has {most} steps: {fix}, or set steps to {max(steps)}"


_NO_FOLDER = RunSetting("folder", None, "there is no folder for checkpoints", "give folder")
_NO_TRACES = RunSetting("folder", None, "there is no folder for the traces", "give folder")
_PROFILE = RunSetting("profile", lambda steps: steps is not None)
_TASKS = RunSetting(
    "executor", "tasks", "with executor 'tasks' each action is a call by itself", "set executor to 'compiled'"
)
OUTPUT_RULES: tuple[RunRule, ...] = (
    _folder_faults,
    _track_faults,
    Conflict(RunSetting("save_every"), _NO_FOLDER),
    _profile_faults,
    Conflict(_PROFILE, _NO_TRACES),
    Conflict(_PROFILE, _TASKS),
)
