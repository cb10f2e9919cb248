"""Saving: everything is written into a hidden folder, which one rename makes a checkpoint."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from raypar.actors.errors import CheckpointError
from raypar.actors.files import exchange, sync_folder, told, write_whole
from raypar.checkpoint.check import file_faults
from raypar.checkpoint.manifest import MANIFEST, Manifest, decode, encode
from raypar.paths import aside_of, checkpoints, is_aside, name_of

log = logging.getLogger(__name__)


class Save:
    """One save under way; as a context manager it is given up unless it was committed.

    Until ``commit`` returns, the checkpoints that were there are untouched. Whoever dies meanwhile leaves a hidden
    folder, which the next save removes: a lock on the folder, which dies with its owner, says that nobody fills it.

    step  the checkpoint is of the state after so many steps
    path  the hidden folder: actors write their shards there
    """

    def __init__(self, folder: Path, step: int) -> None:
        """Begin. Raises CheckpointError if the folder can't be written, or while another save is under way there."""
        self.step = step
        self._folder = folder
        self._final = folder / name_of(step)
        self.path = folder / aside_of(step)
        with told(f"no checkpoint can be written to {str(folder)!r}"):
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
        """Make what was written a checkpoint, in the place of one of the same step; returns its path.

        Of those of earlier steps, only the ``keep_last - 1`` newest stay; None keeps all. Raises CheckpointError, and
        gives the save up, if the shards are not what the manifest says or the disk refuses.
        """
        assert self._open and manifest.step == self.step and (keep_last is None or keep_last >= 1)
        try:
            text = encode(manifest)
            if faults := [*decode(text)[1], *file_faults(self.path, manifest, digests=False)]:
                raise CheckpointError(faults)
            with told(f"{str(self._final)!r} can't be written"):
                write_whole(self.path / MANIFEST, [memoryview(text)])
                sync_folder(self.path)
                if self._final.is_dir() and not self._final.is_symlink():
                    exchange(self.path, self._final)
                else:
                    self.path.rename(self._final)
                sync_folder(self._folder)
            if keep_last is not None:
                self._thin(keep_last)
        finally:
            self.abort()
        return self._final

    def abort(self) -> None:
        """Remove what is not committed and let go of the folder; does nothing the second time."""
        if self._open:
            self._open = False
            try:
                shutil.rmtree(self.path, ignore_errors=True)
            finally:
                os.close(self._lock)

    def _thin(self, keep_last: int) -> None:
        """Remove earlier checkpoints; the one just committed is the newest sound one, and stays."""
        earlier = [(step, path) for step, path in checkpoints(self._folder) if step < self.step]
        for step, path in earlier[keep_last - 1 :]:
            try:
                path.rename(aside := self._folder / aside_of(step))  # from here on it is a leftover, not half of one
                shutil.rmtree(aside)
            except OSError as error:
                log.warning("%s can't be removed (%s)", path, error.strerror)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abort()


def _locked(folder: Path) -> int:
    """A descriptor that holds the folder's lock until it is closed or its process dies."""
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
    """Remove what killed saves left behind; the caller holds the lock, so nobody else is saving."""
    for path in folder.iterdir():
        if is_aside(path.name):
            with suppress(OSError):  # an actor of a killed run may still be writing there: the next save tries again
                shutil.rmtree(path)
