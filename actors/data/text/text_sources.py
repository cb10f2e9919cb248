"""The files of a text: found, read, and cut into chunks. Imports only the standard library."""

from __future__ import annotations

import codecs
import errno
import functools
import glob
import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from raypar.actors.machine.files import expanded, open_named, to_utf8

SKIPPED = "below a folder or a glob, hidden files, .bin files and files with a NUL in their first 8 KiB are skipped"
_HEAD = 64 << 10  # bytes of a named file that are checked to be text
_SPACES = b"\t\n\v\f\r\x1a\x1b"
_CHUNK = 1 << 20  # bytes read and encoded at a time
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})


@dataclass(frozen=True)
class SourceFile:
    """A file of a text, with its size and time when it was listed."""

    name: str  # relative to what the user named, so that it is the same on every machine
    path: Path
    size: int
    mtime: int  # ns
    named: bool  # by the user directly: then it must be text


def source_files(setting: str, path: str, cache: Path, faults: list[str]) -> list[SourceFile]:
    """List the files that a path names, sorted, without those of the cache.

    Args:
        setting: What the user calls this path ("path" or "val_path"), for messages.
        path: A file, folder, glob or "stdlib" (see ``Text.path``).
        cache: The folder of the converted tokens.
        faults: Faults of the path are appended to it.
    """
    files: list[SourceFile] = []
    try:
        if path == "stdlib":
            files = [*_standard_library()]
        else:
            target, cache = expanded(path), cache.resolve()
            root, names = _find(path, target)
            files = [file for file in _listed(root, names, target) if file.named or not file.path.is_relative_to(cache)]
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name, a loop of links
        faults.append(f"{setting}: {cannot_be_read(path, unreadable_reason(error))}")
        return []
    if locked := [file.name for file in files if not os.access(file.path, os.R_OK)]:
        faults.append(f"{setting}: no permission to read {', '.join(locked[:9])} ({len(locked)} in all): chmod +r")
    if not any(file.size for file in files):
        faults.append(f"{setting}: {path!r} is empty ({SKIPPED}): give files with text in them")
    if path.endswith(".bin") and files and files[0].size % 2:
        faults.append(f"{setting}: {path!r} has an odd size, {files[0].size} bytes: write its tokens as uint16")
    if not locked and not path.endswith(".bin"):
        faults += [f"{setting}: {path!r} {why}" for file in files if file.named and (why := why_no_text(file))]
    return files


@functools.cache  # several actors may be threads of one process, and it does not change below a running Python
def _standard_library() -> tuple[SourceFile, ...]:
    """Return the files of Python's standard library that are text."""
    root = Path(sysconfig.get_path("stdlib"))
    return tuple(_listed(root, (name for name in _below(root, _NOT_STDLIB) if name.endswith(".py"))))


def _listed(root: Path, names: Iterable[str], target: Path | None = None) -> Iterator[SourceFile]:
    """Yield the files of a folder that have these names, sorted; ``target`` is what the user named."""
    base = root.resolve()
    for name in sorted(names):
        file = base / name
        stat = file.stat()
        yield SourceFile(name, file, stat.st_size, stat.st_mtime_ns, root / name == target)


def is_text(file: SourceFile) -> bool:
    """Return whether a nonempty file is read: the user has named it, or its first 8 KiB have no NUL."""
    with open_named(file.path) as source:
        return file.named or (file.path.suffix != ".bin" and b"\0" not in source.read(8 << 10))


def why_skipped(file: SourceFile) -> str:
    """Return why a file below a folder or a glob is skipped, with the fix."""
    if not file.size:
        return "is empty"
    if file.path.suffix == ".bin":
        return "is a .bin file, which is named by its own path"
    return why_no_text(file).partition(": give ")[0]


def unreadable_reason(error: Exception) -> str:
    """Return why a file can't be read, without the errno and the path of Python's text."""
    return str(getattr(error, "strerror", None) or error)


def why_absent(path: str) -> str:
    """Return why a user's path names no file."""
    return "the pattern matches no file" if glob.has_magic(path) else "there is no such file or folder"


def cannot_be_read(path: str, why: str) -> str:
    """Say that a user's path can't be read, with the fix."""
    return f"{path!r} cannot be read ({why}): correct the path"


def chunks_of(file: SourceFile, sources: hashlib._Hash, last: bool) -> Iterator[bytes]:
    """Yield a file in chunks of about 1 MiB that end at line ends.

    A file gets a final newline if it lacks one and is not the ``last``.

    Args:
        file: The file.
        sources: A hash that is updated with all bytes of the file.
        last: Whether no other file follows.

    Raises:
        OSError: The file changed since it was listed, or can't be read.
    """
    rest = b""
    for block in file_blocks(file):
        sources.update(block)
        rest += block
        if len(rest) >= _CHUNK:
            cut = _cut(rest)
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest if last or rest.endswith(b"\n") else rest + b"\n"


def file_blocks(file: SourceFile) -> Iterator[bytes]:
    """Yield a file's bytes. Raises OSError if the file changed since it was listed."""
    with open_named(file.path) as source:
        while block := source.read(_CHUNK):
            yield block
        stat = os.fstat(source.fileno())
    if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime):
        raise OSError(f"{file.path} changed while it was being read")


def why_no_text(file: SourceFile) -> str:
    """Return why a file is no UTF-8 text, judged by its first 64 KiB, with the fix; "" if it is."""
    with open_named(file.path) as source:
        head = source.read(_HEAD)
    zeros = head.count(0)
    half = max(head[0::2].count(0), head[1::2].count(0))  # of UTF-16 every other byte is often 0
    is_wide = half == zeros and 5 * zeros > len(head) and not any(_is_strange(byte) for byte in set(head) - {0})
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or is_wide:
        return f"is UTF-16, and text is read as UTF-8: {to_utf8(file.path, 'UTF-16')}"
    if zeros:
        return f"is no text: byte {head.index(0)} is NUL: give a text file, or uint16 tokens in a file named .bin"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < _HEAD)
    except UnicodeDecodeError as error:
        strange = sum(_is_strange(byte) or 127 <= byte < 160 for byte in head)
        where = f"byte {error.start} ({head[error.start]:#04x}) is not UTF-8"
        if 100 * strange > len(head):
            return f"is no text: {where}: give a text file, or uint16 tokens in a file named .bin"
        return f"is text in another encoding, perhaps latin-1: {where}: {to_utf8(file.path, 'LATIN1')}"
    return ""


def _is_strange(byte: int) -> bool:
    """Return whether a byte is a control character that no text has."""
    return byte < 32 and byte not in _SPACES


def _find(path: str, target: Path) -> tuple[Path, list[str]]:
    """Return a folder and the files that ``path`` names, relative to that folder with "/" as separator."""
    if path and target.is_file():
        return target.parent, [target.name]
    if path and target.is_dir() and not path.endswith(".bin"):
        return target, list(_below(target))
    if path and target.exists() and not target.is_dir():
        raise OSError(errno.EINVAL, "it is no plain file")
    if not glob.has_magic(path):
        raise FileNotFoundError(why_absent(path))
    if path.endswith(".bin"):
        raise FileNotFoundError("a .bin file is named by its own path, one alone")
    root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), target.parts))
    # glob and not pathlib, whose ** takes hidden files and, before Python 3.13, no files at the end
    found = [Path(name) for name in glob.glob(str(target), recursive=True)]  # noqa: PTH207
    if not (names := [file.relative_to(root).as_posix() for file in found if file.is_file()]):
        raise FileNotFoundError(why_absent(path))
    return root, names


def _below(root: Path, without: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield all regular files below ``root`` that are not hidden. Links to folders are not followed."""

    def fail(error: OSError) -> None:
        raise error  # by default os.walk skips folders that it cannot read

    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        inside = f"{Path(folder).relative_to(root).as_posix()}/".removeprefix("./")
        seen = (name for name in names if not name.startswith("."))  # strings: there may be thousands, per actor
        yield from (inside + name for name in seen if os.path.isfile(f"{folder}/{name}"))  # noqa: PTH113


def _cut(text: bytes) -> int:
    """Return where to cut: after the last newline, else before the last space, else between two UTF-8 characters."""
    if line := text.rfind(b"\n") + 1:
        return line
    if (space := text.rfind(b" ")) > 0:
        return space
    # continuation bytes are 0b10xxxxxx; a character has at most three
    return next((cut for cut in range(len(text) - 1, len(text) - 5, -1) if text[cut] & 0xC0 != 0x80), len(text))
