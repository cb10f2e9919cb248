"""Check a run's folder and trackers, as far as that is possible before the run starts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path

from raypar.actors.specs.types import Tracker
from raypar.config.fields import short_repr
from raypar.config.rules import Conflict, Examined, RunRule, RunSetting
from raypar.config.validate.replacing import is_under_way, replacing_faults
from raypar.paths import (
    AUTO,
    CHECKPOINTS,
    METRICS,
    MOST_METRICS,
    RUN_FILES,
    RUNS,
    TRAINING_FILES,
    absolute,
    holds_run,
    run_folder_of,
)

_PACKAGES: dict[Tracker, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


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
        folder: The run's folder; "auto" is one below runs/ that is not there yet.
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
        yield from (f"folder {folder!r} {fault}" for fault in _faults(absolute(folder), resumed, overwrite))
    except (OSError, RuntimeError, ValueError) as error:
        yield f"folder {folder!r} can't be used ({getattr(error, 'strerror', None) or error}): give another path"


def _faults(path: Path, resumed: Path | None, overwrite: bool) -> Iterator[str]:
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
        if _is_home(path, resumed):
            yield "holds the checkpoint to resume from: leave overwrite out, or give another folder"
        yield from replacing_faults(path)
    elif not new and not _is_home(path, resumed):
        taken = [name for name in TRAINING_FILES if os.path.lexists(path / name)]
        if taken and is_under_way(path):
            yield "holds a run that is under way: end that one first, or give another folder"
        elif taken:
            how = f"--resume {path} (in Python launch(run, resume=...))"
            fix = f"resume it with {how}, replace it with --overwrite (overwrite=True), or give another folder"
            yield f"holds a run already ({taken[0]}): {fix}"


def _file_faults(path: Path) -> Iterator[str]:
    """Yield what in a folder can't be written or read on, among the files of a run."""
    for name in (*RUN_FILES, CHECKPOINTS):
        there, fix = path / name, "remove it, or give another folder"
        if there.is_symlink():
            yield f"has a symbolic link {name}, and raypar writes through none: {fix}"
        elif there.exists() and not (there.is_dir() if name == CHECKPOINTS else there.is_file()):
            yield f"has {name}, which is no {'folder' if name == CHECKPOINTS else 'plain file'}: {fix}"
        elif name == METRICS and there.exists() and there.stat().st_size > MOST_METRICS:
            yield f"has {name} of more than {MOST_METRICS >> 30} GiB, which a run can't go on from: move it away"


def _is_home(path: Path, resumed: Path | None) -> bool:
    """Return whether the checkpoint to continue from is in this run folder."""
    home = None if resumed is None else run_folder_of(resumed)
    return home is not None and home.resolve() == path.resolve()


def _folder_faults(examined: Examined) -> Iterator[str]:
    """Yield the reasons why a run cannot use its folder."""
    if (folder := examined.run.folder) is not None:
        yield from run_folder_faults(folder, examined.resumed, overwrite=examined.overwrite)


_NO_FOLDER = RunSetting("folder", None, "there is no folder for checkpoints", "give folder")
OUTPUT_RULES: tuple[RunRule, ...] = (_folder_faults, _track_faults, Conflict(RunSetting("save_every"), _NO_FOLDER))
