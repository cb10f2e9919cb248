"""Run folders before and after a launch: a new one for ``folder="auto"``, and the run that another one replaces."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from uuid import uuid4

from raypar.actors.errors import CheckpointError
from raypar.actors.machine.files import checkpoint_errors
from raypar.actors.specs.run import Run
from raypar.errors import ConfigError
from raypar.paths import AUTO, RUNS, absolute, checkpoints_in, holds_run

log = logging.getLogger(__name__)
_OF_A_JOB = "working_dir_files"  # in the path of the folder in which Ray runs a job that was submitted with its files


def settled(run: Run) -> Run:
    """Return a run whose folder is a path: for "auto" a new dated folder below runs/, which is created and logged.

    Args:
        run: The run, which was checked.

    Raises:
        ConfigError: The folder can't be made.
    """
    if run.folder != AUTO:
        return run
    name = time.strftime("%Y-%m-%d-%H%M%S")
    try:
        with checkpoint_errors(f"a folder below {RUNS!r} can't be made"):
            Path(RUNS).mkdir(exist_ok=True)
            for number in count(1):
                folder = Path(RUNS) / (name if number == 1 else f"{name}-{number}")
                with suppress(FileExistsError):  # of another run that begins in the same second
                    folder.mkdir()
                    break
    except CheckpointError as error:
        raise ConfigError(error.faults) from error
    log.info("run folder: %s", folder)
    if _OF_A_JOB in folder.absolute().parts:
        log.warning("Ray may delete that folder after this job, as it is in the job's working_dir: give --folder")
    return replace(run, folder=str(folder))


@contextmanager
def replaced(folder: str | None) -> Iterator[None]:
    """Move the run in a folder aside; remove it once the run of the ``with`` block has begun, else move it back.

    Args:
        folder: The run folder, which was checked; None to replace nothing.

    Raises:
        ConfigError: The folder can't be moved.
    """
    path = None if folder is None else absolute(folder)
    if path is None or path.is_symlink() or not holds_run(path):
        yield
        return
    aside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        path.rename(aside)
    except OSError as error:
        raise ConfigError([f"folder {folder!r} can't be replaced ({error.strerror}): give another folder"]) from error
    try:
        yield
    except BaseException:
        with suppress(OSError):
            shutil.rmtree(path, ignore_errors=True)
            aside.rename(path)
        if aside.exists():
            log.warning("the run that was in %s is in %s now", path, aside)
        raise
    if holds_run(path):
        shutil.rmtree(aside, ignore_errors=True)
    if aside.exists():
        log.warning("the run that was in %s is in %s now: remove it when you need it no more", path, aside)


@contextmanager
def put_aside(run: Run) -> Iterator[Path]:
    """Give the folder for a checkpoint that a run goes on from: that of the run's own, or one for a while."""
    if run.folder is not None:
        yield checkpoints_in(absolute(run.folder))
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
