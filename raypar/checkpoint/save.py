"""Save a checkpoint: write everything into a hidden folder, which one rename turns into a checkpoint."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType

from raypar.actors.errors import CheckpointError
from raypar.actors.machine.files import checkpoint_errors, swap_paths, sync_folder, write_whole
from raypar.checkpoint.check import file_faults
from raypar.checkpoint.manifest import MANIFEST, Manifest, decode, encode
from raypar.paths import aside_of, checkpoints, is_aside, step_folder_name

log = logging.getLogger(__name__)


class Save(AbstractContextManager["Save"]):
    """A save under way. As a context manager, it aborts unless it was committed.

    Existing checkpoints are untouched until ``commit``. A process that dies during a save leaves a hidden folder, which
    the next save removes. A file lock, which ends with its process, allows only one save to the folder at a time.

    Args:
        folder: Folder of checkpoints; created if it does not exist.
        step: Number of steps taken so far.

    Attributes:
        step: Number of steps taken so far.
        path: The hidden folder, into which the actors write their shards.

    Raises:
        CheckpointError: The folder can't be written, or another save to it is under way.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.step = step
        self._folder = folder
        self._final = folder / step_folder_name(step)
        self.path = folder / aside_of(step)
        with checkpoint_errors(f"no checkpoint can be written to {str(folder)!r}"):
            if not folder.is_dir():
                folder.mkdir(parents=True)
                sync_folder(folder.parent)
            self._lock = _locked(folder)
            try:
                _sweep(folder)
                self.path.mkdir()
            except BaseException:
                os.close(self._lock)
                raise
        self._open = True

    def commit(self, manifest: Manifest, keep_last: int | None = None) -> Path:
        """Turn the written shards into a checkpoint, which replaces one of the same step.

        Args:
            manifest: The checkpoint's manifest.
            keep_last: Number of checkpoints to keep, this one included: older ones of earlier steps are removed. None
                keeps all.

        Returns:
            The checkpoint's path.

        Raises:
            CheckpointError: The shards do not match the manifest, or can't be written. The save is aborted.
        """
        assert self._open and manifest.step == self.step and (keep_last is None or keep_last >= 1)
        try:
            text = encode(manifest)
            CheckpointError.raise_if([*decode(text)[1], *file_faults(self.path, manifest, digests=False)])
            with checkpoint_errors(f"{str(self._final)!r} can't be written"):
                write_whole(self.path / MANIFEST, [memoryview(text)])
                sync_folder(self.path)
                if self._final.is_dir() and not self._final.is_symlink():
                    swap_paths(self.path, self._final)
                else:
                    self.path.rename(self._final)
                sync_folder(self._folder)
            if keep_last is not None:
                self._thin(keep_last)
        finally:
            self.abort()
        return self._final

    def abort(self) -> None:
        """Remove what was not committed and release the lock. A second call does nothing."""
        if self._open:
            self._open = False
            try:
                shutil.rmtree(self.path, ignore_errors=True)
            finally:
                os.close(self._lock)

    def _thin(self, keep_last: int) -> None:
        """Remove checkpoints of earlier steps, except the newest ``keep_last - 1``."""
        earlier = [(step, path) for step, path in checkpoints(self._folder) if step < self.step]
        for step, path in earlier[keep_last - 1 :]:
            try:
                path.rename(aside := self._folder / aside_of(step))  # so that no half-removed checkpoint is visible
                shutil.rmtree(aside)
            except OSError as error:
                log.warning("%s can't be removed (%s)", path, error.strerror)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abort()


def _locked(folder: Path) -> int:
    """Lock a folder and return the file descriptor, which holds the lock until it is closed or the process dies."""
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise CheckpointError(
            [f"another save to {str(folder)!r} is under way: wait for it, or give another"]
        ) from error
    except BaseException:
        os.close(lock)
        raise
    return lock


def _sweep(folder: Path) -> None:
    """Remove the hidden folders of killed saves. The caller holds the lock, so no other save is under way."""
    for path in folder.iterdir():
        if is_aside(path.name):
            with suppress(OSError):  # an actor of a killed run may still write there; the next save tries again
                shutil.rmtree(path)
