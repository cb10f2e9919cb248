"""Text files as one array of token ids: found, converted once into the cache folder, then memory-mapped.

This file needs only numpy: the driver checks the data without torch. A cache entry is ``tokens/<key>.bin`` (ids, little
endian) and ``tokens/<key>.json``, which is written last. The key covers the names, sizes and modification times of the
sources and the content of the tokenizer. So an entry never goes stale, and two processes that convert at the same time
write the same bytes.
"""

from __future__ import annotations

import codecs
import errno
import glob
import hashlib
import itertools
import json
import logging
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from raypar.actors.errors import FaultsError
from raypar.actors.files import WholeFile, expanded, read_named, write_whole
from raypar.actors.specs.data import Text

log = logging.getLogger(__name__)
Tokens: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

_FORMAT = 1  # part of every key: raise it when the conversion changes
_MOST_TOKENIZER = 1 << 30  # bytes of a tokenizer file
_HEAD = 64 << 10  # bytes of a named file that are looked at, to tell whether it is text
_SPACES = b"\t\n\v\f\r\x1a\x1b"
_CHUNK = 1 << 20  # bytes read and encoded at a time
_SKIPPED = "below a folder or a glob, hidden files, .bin files and files with a NUL in their first 8 KiB are skipped"
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})


class TextError(FaultsError, ValueError):
    """Faults of the user's text."""


@dataclass(frozen=True)
class Facts:
    """Properties of an array of tokens, stored as the JSON file of a cache entry."""

    dtype: str  # numpy's name: "|u1" (bytes), "<u2" or "<u4"
    count: int  # tokens
    vocab: int  # 256 for bytes, the tokenizer's size, or max_id + 1 for .bin
    max_id: int  # largest id that occurs
    sha256: str  # of the array
    fingerprint: str  # of the sources (relative names, sizes, contents) and the tokenizer


@dataclass(frozen=True)
class _File:
    name: str  # relative to what the user named, so that it is the same on every machine
    path: Path
    size: int
    mtime: int  # ns
    named: bool  # by the user directly: then it must be text


@dataclass(frozen=True)
class _Entry:
    """The place of a path's tokens in the cache."""

    files: list[_File]
    is_bin: bool  # already token ids: mapped in place; the cache keeps only their facts
    tokenizer: str | None  # its sha256, "" for bytes; None if it can't be read
    data: Path
    facts: Path


@dataclass(frozen=True)
class _Encoder:
    encode: Callable[[bytes], Tokens]
    dtype: str
    vocab: int


def is_converted(text: Text) -> bool:
    """Return whether the cache has the tokens of a text, so that to open it writes nothing; True if it can't be opened.

    Args:
        text: The text.
    """
    for path in (text.path, *([] if text.val_path is None else [text.val_path])):
        faults: list[str] = []
        entry = _entry("", path, text.tokenizer, text.cache, faults)
        if not faults and _read_facts(entry.facts, entry.data) is None:
            return False
    return True


def open_tokens(setting: str, path: str, tokenizer: str | None, cache: str | None) -> tuple[Tokens, Facts]:
    """Open the tokens of a path, converting them first if the cache has none.

    Args:
        setting: What the user calls this path ("path" or "val_path"), for messages.
        path: A file, folder, glob or "stdlib" (see ``Text.path``).
        tokenizer: Path of a tokenizers JSON file; None for bytes.
        cache: The cache folder; None for $XDG_CACHE_HOME/raypar or ~/.cache/raypar.

    Returns:
        A 1-d read-only memory map of token ids, and its properties.

    Raises:
        TextError: All faults of path, tokenizer and cache folder.
    """
    faults: list[str] = []
    entry = _entry(setting, path, tokenizer, cache, faults)
    files, data = entry.files, entry.data
    facts = None if faults else _read_facts(entry.facts, data)
    if facts is None:
        encoder = None if entry.tokenizer is None else _encoder(tokenizer, faults)
        _make_folder(entry.facts.parent, faults)
        if faults or encoder is None:
            raise TextError(faults)
        try:
            taken = files if entry.is_bin else [file for file in files if file.size and _is_text(file)]
            log.info("converting %s %r to tokens, once: %s", setting, path, _told(files, taken))
            facts = _scan(files[0]) if entry.is_bin else _convert(taken, encoder, entry.tokenizer or "", data)
            write_whole(entry.facts, [memoryview(json.dumps(asdict(facts), indent=1).encode())])
        except (OSError, ValueError) as error:
            raise TextError([f"{setting}: {path!r} cannot be converted ({error}): repair that"]) from error
    if not facts.count:
        raise TextError([f"{setting}: {path!r} is empty ({_SKIPPED}): give files with text in them"])
    return np.memmap(data, np.dtype(facts.dtype), mode="r"), facts


def _entry(setting: str, path: str, tokenizer: str | None, cache: str | None, faults: list[str]) -> _Entry:
    """Find where the cache has the tokens of a path. Faults are appended to ``faults``."""
    folder = expanded(cache or os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/raypar").absolute() / "tokens"
    is_bin = path.endswith(".bin")
    files = _sources(setting, path, folder, faults)
    tokenizer_sha = _tokenizer_sha(tokenizer, faults)
    key = hashlib.sha256(repr((_FORMAT, files, is_bin or tokenizer_sha)).encode()).hexdigest()[:32]
    data = files[0].path if is_bin and files else folder / f"{key}.bin"
    return _Entry(files, is_bin, tokenizer_sha, data, folder / f"{key}.json")


def _told(files: list[_File], taken: list[_File]) -> str:
    """Say how many files and bytes are converted, and how many files are left out."""
    count = "1 file" if len(taken) == 1 else f"{len(taken)} files"
    skipped = f" ({len(files) - len(taken)} without text skipped)" if len(taken) < len(files) else ""
    return f"{count}, {sum(file.size for file in taken):,} bytes{skipped}"


def _sources(setting: str, path: str, cache: Path, faults: list[str]) -> list[_File]:
    """List the files that ``path`` names, sorted, without those of the cache. Faults are appended to ``faults``."""
    files: list[_File] = []
    try:
        target = expanded(path)
        root, names = _find(path, target)
        base, cache = root.resolve(), cache.resolve()
        for name in sorted(names):
            file = base / name
            if (named := root / name == target) or not file.is_relative_to(cache):
                stat = file.stat()
                files.append(_File(name, file, stat.st_size, stat.st_mtime_ns, named))
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name, a loop of links
        faults.append(f"{setting}: {path!r} cannot be read ({_reason(error)}): correct the path")
        return []
    if locked := [file.name for file in files if not os.access(file.path, os.R_OK)]:
        faults.append(f"{setting}: no permission to read {', '.join(locked[:9])} ({len(locked)} in all): chmod +r")
    if not any(file.size for file in files):
        faults.append(f"{setting}: {path!r} is empty ({_SKIPPED}): give files with text in them")
    if path.endswith(".bin") and files and files[0].size % 2:
        faults.append(f"{setting}: {path!r} has an odd size, {files[0].size} bytes: write its tokens as uint16")
    if not locked and not path.endswith(".bin"):
        faults += [f"{setting}: {path!r} {why}" for file in files if file.named for why in _no_text(file)]
    return files


def _no_text(file: _File) -> Iterator[str]:
    """Yield why a file is no UTF-8 text, by its first 64 KiB, and what to do."""
    with file.path.open("rb") as source:
        head = source.read(_HEAD)
    zeros = head.count(0)
    half = max(head[0::2].count(0), head[1::2].count(0))  # of UTF-16 every other byte is often 0
    is_text = not any(byte < 32 and byte not in _SPACES for byte in set(head) - {0})
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or (half == zeros and 5 * zeros > len(head) and is_text):
        yield f"is UTF-16, and text is read as UTF-8: iconv -f UTF-16 -t UTF-8 {file.path.name} > utf8.txt"
    elif zeros:
        yield f"is no text: byte {head.index(0)} is NUL: give a text file, or uint16 tokens in a file named .bin"
    else:
        try:
            codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < _HEAD)
        except UnicodeDecodeError as error:
            strange = sum(byte < 32 and byte not in _SPACES for byte in head) + sum(127 <= byte < 160 for byte in head)
            where = f"byte {error.start} ({head[error.start]:#04x}) is not UTF-8"
            if 100 * strange > len(head):
                yield f"is no text: {where}: give a text file, or uint16 tokens in a file named .bin"
            else:
                fix = f"iconv -f LATIN1 -t UTF-8 {file.path.name} > utf8.txt"
                yield f"is text in another encoding, perhaps latin-1: {where}: {fix}"


def _find(path: str, target: Path) -> tuple[Path, list[str]]:
    """Return a folder and the files that ``path`` names, relative to that folder with "/" as separator."""
    if path == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return root, [name for name in _below(root, _NOT_STDLIB) if name.endswith(".py")]
    if path and target.is_file():
        return target.parent, [target.name]
    if path and target.is_dir() and not path.endswith(".bin"):
        return target, list(_below(target))
    if path and target.exists() and not target.is_dir():
        raise OSError(errno.EINVAL, "it is no plain file")
    if not glob.has_magic(path):
        raise FileNotFoundError("there is no such file or folder")
    if path.endswith(".bin"):
        raise FileNotFoundError("a .bin file is named by its own path, one alone")
    root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), target.parts))
    # glob and not pathlib, whose ** takes hidden files and, before Python 3.13, no files at the end
    found = [Path(name) for name in glob.glob(str(target), recursive=True)]  # noqa: PTH207
    if not (names := [file.relative_to(root).as_posix() for file in found if file.is_file()]):
        raise FileNotFoundError("the pattern matches no file")
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


def _is_text(file: _File) -> bool:
    with file.path.open("rb") as source:
        return file.named or (file.path.suffix != ".bin" and b"\0" not in source.read(8 << 10))


def _reason(error: Exception) -> str:
    """Say why a file can't be read, without the number and the path that Python's text has too."""
    return str(getattr(error, "strerror", None) or error)


def _tokenizer_sha(tokenizer: str | None, faults: list[str]) -> str | None:
    """Return the sha256 of the tokenizer file; "" for bytes, None if the file cannot be read."""
    try:
        return "" if tokenizer is None else hashlib.sha256(read_named(expanded(tokenizer), _MOST_TOKENIZER)).hexdigest()
    except (OSError, ValueError) as error:
        faults.append(
            f"tokenizer: {tokenizer!r} cannot be read ({_reason(error)}): correct the path, or leave it out for bytes"
        )
        return None


def _encoder(tokenizer: str | None, faults: list[str]) -> _Encoder | None:
    if tokenizer is None:
        return _Encoder(lambda text: np.frombuffer(text, np.uint8), "|u1", 256)
    try:
        from tokenizers import Tokenizer  # optional dependency, needed only for the first conversion

        model = Tokenizer.from_file(str(expanded(tokenizer)))
    except ImportError:
        faults.append("tokenizer: it needs the tokenizers package: pip install tokenizers")
        return None
    except Exception as error:  # tokenizers raises Exception itself
        faults.append(f"tokenizer: {tokenizer!r} is not a tokenizers JSON file ({error}): give a tokenizer.json")
        return None
    model.no_truncation()  # a tokenizer file made for inference may truncate texts to 512 tokens
    model.no_padding()  # or pad them
    vocab = max(model.get_vocab().values(), default=-1) + 1  # more than get_vocab_size() if the ids have holes
    dtype = "<u2" if vocab <= 1 << 16 else "<u4"

    def encode(text: bytes) -> Tokens:
        try:
            ids = model.encode(text.decode(errors="replace"), add_special_tokens=False).ids
        except Exception as error:  # tokenizers raises Exception itself, for a word without a token, say
            raise ValueError(f"the tokenizer fails: {error}") from error
        return np.array(ids, dtype)

    return _Encoder(encode, dtype, vocab)


def _convert(files: list[_File], encoder: _Encoder, tokenizer_sha: str, data: Path) -> Facts:
    """Write the tokens of text files, one after the other, to ``data``. Needs memory for a few chunks only."""
    sources, tokens, count, max_id = hashlib.sha256(tokenizer_sha.encode()), hashlib.sha256(), 0, 0
    with WholeFile(data) as out:
        for number, file in enumerate(files):
            sources.update(repr((file.name, file.size)).encode())
            for chunk in _chunks(file, sources, last=number == len(files) - 1):
                ids = encoder.encode(chunk)
                out.write(ids.tobytes())
                tokens.update(ids.tobytes())
                count, max_id = count + len(ids), max(max_id, int(ids.max(initial=0)))
        out.commit()
    return Facts(encoder.dtype, count, encoder.vocab, max_id, tokens.hexdigest(), sources.hexdigest())


def _chunks(file: _File, sources: hashlib._Hash, last: bool) -> Iterator[bytes]:
    """Yield a file in chunks that end at line ends.

    A file gets a final newline if it lacks one and is not the ``last``.
    """
    rest = b""
    for block in _blocks(file):
        sources.update(block)
        rest += block
        if len(rest) >= _CHUNK:
            cut = _cut(rest)
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest if last or rest.endswith(b"\n") else rest + b"\n"


def _cut(text: bytes) -> int:
    """Return where to cut: after the last newline, else before the last space, else between two UTF-8 characters."""
    if line := text.rfind(b"\n") + 1:
        return line
    if (space := text.rfind(b" ")) > 0:
        return space
    # continuation bytes are 0b10xxxxxx; a character has at most three
    return next((cut for cut in range(len(text) - 1, len(text) - 5, -1) if text[cut] & 0xC0 != 0x80), len(text))


def _scan(file: _File) -> Facts:
    """Compute the facts of a ``.bin`` file, which is used in place."""
    tokens, max_id = hashlib.sha256(), 0
    for block in _blocks(file):
        tokens.update(block)
        max_id = max(max_id, int(np.frombuffer(block, "<u2").max()))
    identity = hashlib.sha256(repr((file.name, file.size, tokens.hexdigest())).encode()).hexdigest()
    return Facts("<u2", file.size // 2, max_id + 1, max_id, tokens.hexdigest(), identity)


def _blocks(file: _File) -> Iterator[bytes]:
    """Yield a file's bytes. Raises OSError if the file changed since it was listed."""
    with file.path.open("rb") as source:
        while block := source.read(_CHUNK):
            yield block
        stat = os.fstat(source.fileno())
    if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime):
        raise OSError(f"{file.path} changed while it was being read")


def _make_folder(folder: Path, faults: list[str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("no permission")
    except (OSError, ValueError) as error:
        faults.append(f"cache: {str(folder)!r} cannot be written to ({error}): set cache to a folder that can")


def _read_facts(path: Path, data: Path) -> Facts | None:
    """Read the facts of a cache entry; None if the entry is missing or incomplete."""
    try:
        facts = Facts(**json.loads(path.read_bytes()))
        whole = data.stat().st_size == facts.count * np.dtype(facts.dtype).itemsize
    except (OSError, ValueError, TypeError):
        return None
    return facts if whole else None
