"""Text files as one array of token ids: found, converted once into the cache folder, then memory-mapped.

This file needs only numpy: the driver checks the data without torch. A cache entry is ``tokens/<key>.bin`` (ids, little
endian) and ``tokens/<key>.json``, which is written last. The key covers the names, sizes and modification times of the
sources and the content of the tokenizer. So an entry never goes stale, and two processes that convert at the same time
write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from raypar.actors.data.conversion import ConversionError, Convert, by_size
from raypar.actors.data.conversion_progress import conversion_progress
from raypar.actors.data.text.text_conversion import TextConversion, Tokens
from raypar.actors.data.text.text_sources import (
    SKIPPED,
    SourceFile,
    chunks_of,
    file_blocks,
    is_text,
    source_files,
    unreadable_reason,
    why_no_text,
    why_skipped,
)
from raypar.actors.data.tokenizers.tokenizer import tokenizer_file
from raypar.actors.errors import FaultsError
from raypar.actors.machine.files import WholeFile, expanded, read_named, write_whole
from raypar.actors.specs.data import Text

log = logging.getLogger(__name__)

_FORMAT = 1  # part of every key: raise it when the conversion changes
_MOST_NAMED = 5  # files that a message names
_MOST_TOKENIZER = 1 << 30  # bytes of a tokenizer file


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
class _Entry:
    """A path's files, and the cache files of its tokens."""

    files: list[SourceFile]
    is_bin: bool  # already token ids: mapped in place; the cache keeps only their facts
    tokenizer: str | None  # its sha256, "" for bytes; None if it can't be read
    data: Path
    facts: Path


def is_converted(text: Text) -> bool:
    """Return whether the cache has the tokens of a text, so that opening it writes nothing; True if it can't be opened.

    Args:
        text: The text.
    """
    for path in (text.path, *([] if text.val_path is None else [text.val_path])):
        faults: list[str] = []
        entry = _entry("", path, text.tokenizer, text.cache, faults)
        if not faults and _read_facts(entry.facts, entry.data) is None:
            return False
    return True


def open_tokens(
    setting: str, path: str, tokenizer: str | None, cache: str | None, convert: Convert = by_size
) -> tuple[Tokens, Facts]:
    """Open the tokens of a path, converting them first if the cache has none.

    Args:
        setting: What the user calls this path ("path" or "val_path"), for messages.
        path: A file, folder, glob or "stdlib" (see ``Text.path``).
        tokenizer: Path of a tokenizers JSON file, or of a folder that has one; None for bytes.
        cache: The cache folder; None for $XDG_CACHE_HOME/raypar or ~/.cache/raypar.
        convert: Converts the chunks of the text.

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
        conversion = TextConversion(tokenizer)
        faults += [] if entry.tokenizer is None else conversion.faults()
        _make_folder(entry.facts.parent, faults)
        TextError.raise_if(faults)
        try:
            taken = files if entry.is_bin else [file for file in files if file.size and is_text(file)]
            count, brief = _conversion_size(files, taken), {"brief": "converting the text to tokens, once"}
            log.info("converting %s %r to tokens, once: %s", setting, path, count, extra=brief)
            if not entry.is_bin:
                _warn_of_encodings(path, taken)
                facts = _convert(taken, conversion, entry.tokenizer or "", data, convert)
            else:
                facts = _scan(files[0])
            write_whole(entry.facts, [memoryview(json.dumps(asdict(facts), indent=1).encode())])
        except ConversionError as error:
            raise TextError([f"{setting}: {path!r} is not converted: {error}"]) from error
        except (OSError, ValueError) as error:
            raise TextError([f"{setting}: {path!r} cannot be converted ({error}): repair that"]) from error
    if not facts.count:
        raise TextError([f"{setting}: {path!r} is empty ({SKIPPED}): give files with text in them"])
    return np.memmap(data, np.dtype(facts.dtype), mode="r"), facts


def _entry(setting: str, path: str, tokenizer: str | None, cache: str | None, faults: list[str]) -> _Entry:
    """Find the cache entry of a path. Faults are appended to ``faults``."""
    folder = expanded(cache or os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/raypar").absolute() / "tokens"
    is_bin = path.endswith(".bin")
    files = source_files(setting, path, folder, faults)
    tokenizer_sha = _tokenizer_sha(tokenizer, faults)
    key = hashlib.sha256(repr((_FORMAT, files, is_bin or tokenizer_sha)).encode()).hexdigest()[:32]
    data = files[0].path if is_bin and files else folder / f"{key}.bin"
    return _Entry(files, is_bin, tokenizer_sha, data, folder / f"{key}.json")


def _conversion_size(files: list[SourceFile], taken: list[SourceFile]) -> str:
    """Return the number of files and bytes that are converted, and of files that are skipped, as text."""
    count = "1 file" if len(taken) == 1 else f"{len(taken)} files"
    size = f"{count}, {sum(file.size for file in taken):,} bytes"
    read = {file.name for file in taken}
    skipped = [file for file in files if file.name not in read]
    if not skipped:
        return size
    return f"{size} ({len(skipped)} without text skipped: {_named(skipped, why_skipped)})"


def _warn_of_encodings(path: str, taken: list[SourceFile]) -> None:
    """Log a warning that names the files that are learned although they are not UTF-8."""
    wrong = {file.name: why for file in taken if not file.named and (why := why_no_text(file))}
    files = [file for file in taken if file.name in wrong]
    if files:
        many = "1 file of it is" if len(files) == 1 else f"{len(files)} files of it are"
        named = _named(files, lambda file: wrong[file.name])
        log.warning("%r: %s not UTF-8, and learned with the wrong characters: %s", path, many, named)


def _named(files: list[SourceFile], why: Callable[[SourceFile], str]) -> str:
    """Name the first files, each with its reason, and count the remaining ones."""
    more = f"; and {len(files) - _MOST_NAMED} more" if len(files) > _MOST_NAMED else ""
    return "; ".join(f"{file.name} {why(file)}" for file in files[:_MOST_NAMED]) + more


def _tokenizer_sha(tokenizer: str | None, faults: list[str]) -> str | None:
    """Return the sha256 of the tokenizer file; "" for bytes, None if the file cannot be read."""
    if tokenizer is None:
        return ""
    try:
        return hashlib.sha256(read_named(tokenizer_file(tokenizer), _MOST_TOKENIZER)).hexdigest()
    except (OSError, ValueError) as error:
        fault = f"tokenizer: {tokenizer!r} cannot be read ({unreadable_reason(error)})"
        faults.append(f"{fault}: correct the path, or leave it out for bytes")
        return None


def _convert(
    files: list[SourceFile], conversion: TextConversion, tokenizer_sha: str, data: Path, convert: Convert
) -> Facts:
    """Write the tokens of text files, concatenated, to ``data``. Needs memory for a few chunks only."""
    sources = hashlib.sha256(tokenizer_sha.encode())
    tokens = hashlib.sha256()
    count = 0
    max_id = 0
    size = sum(file.size for file in files)
    with WholeFile(data) as out, conversion_progress(size) as read:

        def chunks() -> Iterator[bytes]:
            for number, file in enumerate(files):
                sources.update(repr((file.name, file.size)).encode())
                for chunk in chunks_of(file, sources, last=number == len(files) - 1):
                    read(len(chunk))
                    yield chunk

        hard = 0 if conversion.tokenizer is None else size  # bytes are only copied
        with closing(convert(conversion, chunks(), hard)) as converted:
            for part in converted:
                out.write(part)
                tokens.update(part)
                ids = np.frombuffer(part, conversion.dtype)
                count, max_id = count + len(ids), max(max_id, int(ids.max(initial=0)))
        out.commit()
    return Facts(conversion.dtype, count, conversion.vocab, max_id, tokens.hexdigest(), sources.hexdigest())


def _scan(file: SourceFile) -> Facts:
    """Compute the facts of a ``.bin`` file, which is used in place."""
    tokens, max_id = hashlib.sha256(), 0
    for block in file_blocks(file):
        tokens.update(block)
        max_id = max(max_id, int(np.frombuffer(block, "<u2").max()))
    identity = hashlib.sha256(repr((file.name, file.size, tokens.hexdigest())).encode()).hexdigest()
    return Facts("<u2", file.size // 2, max_id + 1, max_id, tokens.hexdigest(), identity)


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
