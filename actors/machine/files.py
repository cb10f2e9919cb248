"""Safe file operations: atomic writes, and reads that follow no link and open no device."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shlex
import shutil
import stat
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import BinaryIO
from uuid import uuid4

from raypar.actors.errors import CheckpointError
from raypar.actors.machine.system_features import has_feature

AT_ONCE = 8 << 20  # bytes of a tensor that are read or compared at a time, unless one row alone is larger


def exhaust(work: Iterator[object], spare: float) -> None:
    """Run ``work`` to its end, at first on idle cores only.

    If threads can't have idle priority (only Linux has SCHED_IDLE), all of the work has normal priority.

    Args:
        work: Each ``next`` does one piece. A piece should take long compared with Python's overhead between two, and
            release the GIL: otherwise other threads wait for the GIL that a lowest-priority thread holds.
        spare: Seconds for which to use only idle cores; afterwards the work runs at normal priority.

    Raises:
        Exception: Any exception of the work.
    """
    if spare > 0 and has_feature("idle_threads"):
        late, errors = threading.Event(), list[BaseException]()
        thread = threading.Thread(target=_work_idly, args=(work, late, errors), name="raypar-spare", daemon=True)
        thread.start()
        thread.join(spare)
        late.set()
        thread.join()
        for error in errors:
            raise error
    deque(work, maxlen=0)


def _work_idly(work: Iterator[object], late: threading.Event, errors: list[BaseException]) -> None:
    """Do pieces of the work at idle priority until it is complete or ``late`` is set, and store an error of it.

    A thread cannot leave SCHED_IDLE, so the work has a separate thread.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        return
    try:
        while not late.is_set() and next(work, late) is not late:
            pass
    except BaseException as error:
        errors.append(error)


_PIECE = 1 << 20  # bytes: a piece is hashed and then written while it is still in cache
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_FIXES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EACCES: "give a folder that may be written",
    errno.EPERM: "give a folder that may be written",
    errno.EROFS: "give a folder that may be written",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ENOTDIR: "give a path that is a folder",
    errno.EEXIST: "give a path that is a folder",
    errno.ENOENT: "give a path that is there, and that every node sees",
}


@contextmanager
def checkpoint_errors(doing: str) -> Iterator[None]:
    """Turn an OSError, or a ValueError for a bad path, into a CheckpointError.

    The error has the operation (``doing``), the reason and the fix.
    """
    try:
        yield
    except OSError as error:
        fix = _FIXES.get(error.errno or 0)
        raise CheckpointError([f"{doing} ({error.strerror or error})" + (f": {fix}" if fix else "")]) from error
    except ValueError as error:  # a NUL in a path
        raise CheckpointError([f"{doing} ({error}): give another path"]) from error


class WholeFile(AbstractContextManager["WholeFile"]):
    """A file that appears at its path only when it is complete.

    It is written under a hidden name; ``commit`` syncs and renames it. The caller must sync the folder afterwards. As a
    context manager, it removes the file unless it is committed.

    Args:
        path: Path of the file.

    Attributes:
        size: Number of bytes written so far.

    Raises:
        OSError: The file can't be created.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._aside = path, path.with_name(f".{uuid4().hex}")
        self._out = os.open(self._aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._open, self._synced, self.size = True, False, 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes to the file. Raises OSError."""
        left = memoryview(data)
        self._synced, self.size = False, self.size + left.nbytes
        while left:
            left = left[os.write(self._out, left) :]

    def sync(self) -> None:
        """Flush written bytes to the disk. Raises OSError."""
        if not self._synced:
            os.fsync(self._out)
            self._synced = True

    def commit(self) -> None:
        """Sync the file and rename it to its path. Raises OSError."""
        self.sync()
        self._aside.rename(self._path)
        self._open = False
        os.close(self._out)

    def close(self) -> None:
        """Remove the file unless it was committed. A second call does nothing."""
        if self._open:
            self._open = False
            with suppress(OSError):
                self._aside.unlink()
            os.close(self._out)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def write_whole(path: Path, parts: Iterable[memoryview], spare: float = 0.0) -> tuple[int, str]:
    """Write a file atomically, as a ``WholeFile``. The caller must sync the folder afterwards.

    Args:
        path: Path of the file.
        parts: The bytes, in parts.
        spare: Seconds for which to use only idle cores (see ``exhaust``).

    Returns:
        The number of bytes, and their sha256 in hex.

    Raises:
        OSError: The file can't be written. No file remains.
    """
    digest = hashlib.sha256()
    with WholeFile(path) as out:
        exhaust(_written(out, parts, digest), spare)
        out.commit()
    return out.size, digest.hexdigest()


def _written(out: WholeFile, parts: Iterable[memoryview], digest: hashlib._Hash) -> Iterator[None]:
    """Hash and write one piece per ``next``; the last ``next`` syncs the file."""
    for part in parts:
        for start in range(0, len(part), _PIECE):
            piece = part[start : start + _PIECE]
            digest.update(piece)
            out.write(piece)
            yield
    out.sync()


def sync_folder(path: Path) -> None:
    """Sync a folder, so that the names in it survive a power cut. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Create a folder that appears at its path only when it is complete.

    Args:
        path: Path of the folder. It must not exist yet, or be an empty folder.

    Yields:
        A hidden folder next to it, to be filled. After the ``with`` block it is synced and renamed.

    Raises:
        OSError: The folder can't be created. It is removed then, and also if the block raises.
    """
    aside = path.with_name(f".{path.name}.{uuid4().hex}")
    aside.mkdir()
    try:
        yield aside
        sync_folder(aside)
        aside.rename(path)
        sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def swap_paths(one: Path, other: Path) -> None:
    """Swap two paths atomically (Linux's renameat2). Raises OSError, also if the file system does not support it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None or rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        code = errno.ENOSYS if rename is None else ctypes.get_errno()
        cant = code in (errno.ENOSYS, errno.EINVAL)
        raise OSError(code, "it exists, and can't be replaced here: remove it first" if cant else os.strerror(code))


def expanded(path: str | PathLike[str]) -> Path:
    """Expand ``~`` in a path. The ``~`` of an unknown user stays, unlike in pathlib's ``expanduser``, which raises."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def plain_size(path: Path) -> int:
    """Return the bytes of a regular file. Raises OSError, also for a link, folder, pipe or device."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no plain file")
    return found.st_size


@contextmanager
def open_named(path: Path) -> Iterator[BinaryIO]:
    """Open a file that the user named, to read it; it may be a link. A pipe raises and does not block.

    Raises:
        OSError: It can't be opened, or it is a pipe, a device or a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        yield file


def to_utf8(path: Path, encoding: str) -> str:
    """Return the command that converts a text file to UTF-8 where it is, for messages."""
    file = shlex.quote(str(path))
    return f"iconv -f {encoding} -t UTF-8 {file} > utf8.txt && mv utf8.txt {file}"


def read_plain(path: Path, limit: int) -> bytes:
    """Read a regular file of at most ``limit`` bytes. Raises OSError."""
    size = plain_size(path)
    with path.open("rb") as file:
        return _read(file, size, limit)


def _read(file: BinaryIO, size: int, limit: int) -> bytes:
    if size > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes")
    return file.read(size)  # allocates this much memory beforehand


def read_named(path: Path, limit: int) -> bytes:
    """Read a file that the user named, which may be a link, like ``read_plain``. Raises OSError or ValueError."""
    with open_named(path) as file:
        return _read(file, os.fstat(file.fileno()).st_size, limit)


def sha256_of(path: Path) -> str:
    """Return the sha256 of a regular file, in hex. Raises OSError."""
    plain_size(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
