"""Files of examples as arrays of tokens: found, converted once into the cache folder, then memory-mapped.

A cache entry is ``examples/<key>.ids``, ``.learned`` and ``.ends``, and ``<key>.json``, which is written last. The key
covers the names, sizes and modification times of the files, the tokenizer and its template. This file needs no torch.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raypar.actors.data.example_shapes import ExampleError, Written, written
from raypar.actors.data.packing import Int64s
from raypar.actors.data.text_files import TextError
from raypar.actors.data.tokenizer import Mask, Tokenizer
from raypar.actors.files import WholeFile, expanded, write_whole
from raypar.actors.specs.data import Examples, Learned

log = logging.getLogger(__name__)

_FORMAT = 1  # part of every key: raise it when the conversion changes
_SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
_AT_ONCE = 1000  # examples that are encoded together
_MOST_TOLD = 5  # examples that are named for what is wrong with them
_MOST_LINE = 1 << 26  # bytes of an example


@dataclass(frozen=True)
class ExampleFacts:
    """Properties of converted examples, stored as the JSON file of a cache entry."""

    dtype: str  # of the ids: "<u2" or "<u4"
    examples: int
    tokens: int
    max_id: int  # largest id that occurs
    num_ids: int  # of the tokenizer
    fingerprint: str  # of the files' contents and the tokenizer


@dataclass(frozen=True, eq=False)  # == on arrays gives no bool
class Converted:
    """Examples as tokens.

    Attributes:
        ids: The ids of all examples, one after the other, a read-only memory map.
        learned: 1 for each that is a target, else 0.
        ends: Number of tokens up to the end of each example.
        facts: Their properties.
    """

    ids: npt.NDArray[np.unsignedinteger[Any]]
    learned: Mask
    ends: Int64s
    facts: ExampleFacts


def open_examples(setting: str, path: str, spec: Examples) -> Converted:
    """Open the examples of a path, converting them first if the cache has none.

    Args:
        setting: What the user calls this path ("path" or "val_path"), for messages.
        path: A file, folder or glob.
        spec: The data, for its tokenizer, template, cache folder, and what is learned.

    Raises:
        TextError: All faults of the path, the tokenizer and the first examples that are wrong.
    """
    try:
        files, tokenizer = _files(setting, path), Tokenizer(spec.tokenizer, spec.template)
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        key = hashlib.sha256(repr((_FORMAT, stats, tokenizer.key, spec.learn)).encode()).hexdigest()[:32]
        folder = expanded(spec.cache or os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/raypar").absolute()
        home = folder / "examples" / key
        facts = _read_facts(home)
        if facts is None:
            home.parent.mkdir(parents=True, exist_ok=True)
            log.info("converting %s %r to tokens, once: %s files", setting, path, len(files))
            facts = _convert(setting, files, tokenizer, spec.learn, home)
            write_whole(home.with_suffix(".json"), [memoryview(json.dumps(asdict(facts), indent=1).encode())])
    except ExampleError as error:
        raise TextError([str(error)]) from error
    except OSError as error:
        raise TextError([f"{setting}: {path!r} can't be converted ({error.strerror or error}): repair that"]) from error
    ids = np.memmap(home.with_suffix(".ids"), np.dtype(facts.dtype), mode="r")
    learned = np.memmap(home.with_suffix(".learned"), np.uint8, mode="r")
    return Converted(ids, learned, np.fromfile(home.with_suffix(".ends"), "<i8"), facts)


def records(file: Path) -> Iterator[Any]:
    """Yield the examples of a file. Raises ExampleError, with the number of the line, or OSError."""
    if file.suffix == ".parquet":
        yield from _rows(file)
    elif file.suffix == ".json":
        found = _parsed(file.read_bytes(), file.name)
        yield from found if isinstance(found, list) else [found]
    elif file.suffix == ".txt":
        yield {"text": file.read_text(errors="replace")}
    else:
        with file.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(_MOST_LINE), b""), 1):
                if line.strip():
                    yield _parsed(line, f"{file.name}, line {number},")


def _parsed(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        return ExampleError(f"{where} is not JSON ({error})")


def _rows(file: Path) -> Iterator[Any]:
    try:
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise ExampleError(f"{file.name} needs the pyarrow package: pip install pyarrow") from error
    for batch in ParquetFile(file).iter_batches(_AT_ONCE):
        yield from batch.to_pylist()


def _files(setting: str, path: str) -> list[Path]:
    """List the files that a path names, sorted. Raises ExampleError."""
    target = expanded(path)
    if target.is_file():
        found = [target]
    elif target.is_dir():
        found = sorted(file for file in target.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    else:
        found = sorted(Path(name) for name in glob.glob(str(target), recursive=True) if Path(name).is_file())  # noqa: PTH207
    if not found:
        raise ExampleError(f"{setting}: {path!r} has no file of {', '.join(_SUFFIXES)}: correct the path")
    if wrong := [file.name for file in found if file.suffix not in _SUFFIXES]:
        raise ExampleError(f"{setting}: {wrong[0]!r} is of no kind that is read: give {', '.join(_SUFFIXES)}")
    return found


def _convert(setting: str, files: Sequence[Path], tokenizer: Tokenizer, learn: Learned, home: Path) -> ExampleFacts:
    """Write the tokens of all examples. Raises TextError with the first ones that are wrong, or OSError."""
    dtype = "<u2" if tokenizer.num_ids <= 1 << 16 else "<u4"
    digest, ends, max_id, faults = hashlib.sha256(tokenizer.key.encode()), list[int](), 0, list[str]()
    total, wrong = 0, 0
    with ExitStack() as stack:
        ids, learned = (stack.enter_context(WholeFile(home.with_suffix(end))) for end in (".ids", ".learned"))
        examples = _written(files, tokenizer, learn, faults)
        while batch := [*islice(examples, _AT_ONCE)]:
            for one in tokenizer.tokenized(batch):
                kept = one.ids.astype(dtype)
                ids.write(kept.tobytes())
                learned.write(one.learned.tobytes())
                digest.update(kept.tobytes())
                digest.update(one.learned.tobytes())
                total, max_id = total + len(kept), max(max_id, int(kept.max(initial=0)))
                ends.append(total)
            wrong = max(wrong, len(faults))
            if wrong > _MOST_TOLD:
                break
        if faults or not ends:
            raise TextError([f"{setting}: {one}" for one in faults[:_MOST_TOLD]] or [f"{setting}: it has no examples"])
        ids.commit()
        learned.commit()
    write_whole(home.with_suffix(".ends"), [memoryview(np.array(ends, "<i8").tobytes())])
    return ExampleFacts(dtype, len(ends), total, max_id, tokenizer.num_ids, digest.hexdigest())


def _written(files: Sequence[Path], tokenizer: Tokenizer, learn: Learned, faults: list[str]) -> Iterator[Written]:
    """Yield the examples of all files as text. What is wrong is appended to ``faults``."""
    for file in files:
        for number, record in enumerate(records(file), 1):
            if isinstance(record, ExampleError):
                faults.append(str(record))
                continue
            try:
                yield written(record, tokenizer.template, tokenizer.end, learns_all=learn == "all")
            except ExampleError as error:
                faults.append(f"example {number} of {file.name} {error}")
            if len(faults) > _MOST_TOLD:
                return


def _read_facts(home: Path) -> ExampleFacts | None:
    """Read the JSON file of an entry; None if there is no whole entry."""
    try:
        facts = ExampleFacts(**json.loads(home.with_suffix(".json").read_bytes()))
        sizes = [home.with_suffix(end).stat().st_size for end in (".ids", ".learned", ".ends")]
    except (OSError, ValueError, TypeError):
        return None
    whole = [facts.tokens * np.dtype(facts.dtype).itemsize, facts.tokens, facts.examples * 8]
    return facts if sizes == whole else None
