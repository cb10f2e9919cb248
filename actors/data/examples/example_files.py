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
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raypar.actors.data.conversion import ConversionError, Convert, by_size
from raypar.actors.data.conversion_progress import conversion_progress
from raypar.actors.data.examples.example_blocks import SUFFIXES, blocks_of_examples
from raypar.actors.data.examples.example_conversion import (
    MOST_NAMED,
    ExampleConversion,
    ExampleFaults,
    add_fault,
    fault_lines,
)
from raypar.actors.data.examples.packing import Int64s
from raypar.actors.data.examples.saved_dataset import is_saved, shards_of, splits_in
from raypar.actors.data.text.text_files import TextError
from raypar.actors.data.text.text_sources import cannot_be_read, why_absent
from raypar.actors.data.tokenizers.example_shapes import ExampleError
from raypar.actors.data.tokenizers.tokenizer import Mask, Tokenizer
from raypar.actors.machine.files import WholeFile, expanded, write_whole
from raypar.actors.specs.data import Examples

log = logging.getLogger(__name__)

_ANNOUNCED = set[Path]()  # entries whose conversion was logged; a failed one is repeated by the next check
_FORMAT = 2  # part of every key: raise it when the conversion changes


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
        ids: The token ids of all examples, concatenated, a read-only memory map.
        loss_mask: 1 for each token that is a target, else 0.
        ends: Number of tokens up to the end of each example.
        facts: Their properties.
    """

    ids: npt.NDArray[np.unsignedinteger[Any]]
    loss_mask: Mask
    ends: Int64s
    facts: ExampleFacts


def open_examples(setting: str, path: str, spec: Examples, convert: Convert = by_size) -> Converted:
    """Open the examples of a path, converting them first if the cache has none.

    Args:
        setting: What the user calls this path ("path" or "val_path"), for messages.
        path: A file, folder, glob, or folder of ``datasets.save_to_disk``.
        spec: The data, for its tokenizer, template, ``learn`` and cache folder.
        convert: Converts blocks of the files.

    Raises:
        TextError: All faults of the path, the tokenizer and the first faulty examples.
    """
    conversion = ExampleConversion(spec.tokenizer, spec.template, spec.learn)
    try:
        tokenizer = conversion.opened
        tokenizer.template  # noqa: B018  (read here, so that its fault is reported once)
    except ExampleError as error:
        raise TextError([str(error)]) from error
    try:
        files = files_of(setting, path)
        entry = _entry(files, spec, tokenizer)
        facts = _read_facts(entry)
        if facts is None:
            entry.parent.mkdir(parents=True, exist_ok=True)
            if entry not in _ANNOUNCED:
                _ANNOUNCED.add(entry)
                count = "1 file" if len(files) == 1 else f"{len(files)} files"
                brief = {"brief": f"converting {count} of examples to tokens, once"}
                log.info("converting %s %r to tokens, once: %s", setting, path, count, extra=brief)
            facts = _convert(files, conversion, entry, convert)
            write_whole(entry.with_suffix(".json"), [memoryview(json.dumps(asdict(facts), indent=1).encode())])
    except TextError as error:
        raise TextError([f"{setting}: {one}" for one in error.faults]) from error
    except ConversionError as error:
        raise TextError([f"{setting}: {path!r} is not converted: {error}"]) from error
    except OSError as error:
        raise TextError([f"{setting}: {path!r} can't be converted ({error.strerror or error}): repair that"]) from error
    except ValueError as error:
        raise TextError([f"{setting}: {error}"]) from error
    ids = np.memmap(entry.with_suffix(".ids"), np.dtype(facts.dtype), mode="r")
    learned = np.memmap(entry.with_suffix(".learned"), np.uint8, mode="r")
    return Converted(ids, learned, np.fromfile(entry.with_suffix(".ends"), "<i8"), facts)


def has_entry(setting: str, path: str, spec: Examples) -> bool:
    """Return whether the cache has the examples of a path, so that opening them writes nothing.

    Returns True if the path or the tokenizer can't be read.

    Args:
        setting: "path" or "val_path".
        path: The path.
        spec: The data.
    """
    try:
        tokenizer = ExampleConversion(spec.tokenizer, spec.template, spec.learn).opened
        tokenizer.template  # noqa: B018  (the key depends on it)
        return _read_facts(_entry(files_of(setting, path), spec, tokenizer)) is not None
    except (OSError, ValueError):
        return True


def _entry(files: Sequence[Path], spec: Examples, tokenizer: Tokenizer) -> Path:
    """Return the path of a cache entry, without a suffix. Raises OSError."""
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(repr((_FORMAT, stats, tokenizer.key, spec.learn)).encode()).hexdigest()[:32]
    folder = expanded(spec.cache or os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/raypar").absolute()
    return folder / "examples" / key


def files_of(setting: str, path: str) -> list[Path]:
    """List the files that a path names, sorted.

    Args:
        setting: "path", or "val_path", for which a saved dataset must name a split.
        path: A file, folder, glob, or folder of ``datasets.save_to_disk``.

    Raises:
        ExampleError: There is no file, or one has a suffix that is not in ``SUFFIXES``.
    """
    target = expanded(path)
    if target.is_file():
        found = [target]
    elif target.is_dir() and is_saved(target):
        return shards_of(target, trains=setting != "val_path")
    elif target.is_dir():
        found = sorted(file for file in target.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    else:
        found = sorted(Path(name) for name in glob.glob(str(target), recursive=True) if Path(name).is_file())  # noqa: PTH207
    if not found and (splits := splits_in(target.parent)):
        if target.name in splits:
            missing = f"has a split {target.name!r}, but none of its files is there"
            raise ExampleError(f"{str(target.parent)!r} {missing}: copy the dataset again")
        raise ExampleError(f"{str(target.parent)!r} has no split {target.name!r}: give one of {', '.join(splits)}")
    if not found and not target.is_dir():
        raise ExampleError(cannot_be_read(path, why_absent(path)))
    if not found:
        raise ExampleError(f"{path!r} has no file of {', '.join(SUFFIXES)}: correct the path")
    if wrong := [file.name for file in found if file.suffix not in SUFFIXES]:
        raise ExampleError(f"{wrong[0]!r} is of no kind that is read: give {', '.join(SUFFIXES)}")
    return found


def _convert(files: Sequence[Path], conversion: ExampleConversion, entry: Path, convert: Convert) -> ExampleFacts:
    """Write the tokens of all examples. Raises TextError with the first faulty ones, ValueError or OSError."""
    digest, ends = hashlib.sha256(conversion.opened.key.encode()), list[int]()
    total = 0
    max_id = 0
    read = 0
    faults = ExampleFaults()
    size = sum(file.stat().st_size for file in files)
    with ExitStack() as stack:
        ids, learned = (stack.enter_context(WholeFile(entry.with_suffix(end))) for end in (".ids", ".learned"))
        blocks = blocks_of_examples(files, stack.enter_context(conversion_progress(size)))
        for answer in stack.enter_context(closing(convert(conversion, blocks, size))):
            found = conversion.tokens(answer)
            ids.write(found.ids.tobytes())
            learned.write(found.loss_mask.tobytes())
            max_id, first = max(max_id, int(found.ids.max(initial=0))), 0
            for length in found.lengths:
                digest.update(found.ids[first : first + length].tobytes())
                digest.update(found.loss_mask[first : first + length].tobytes())
                first += length
                ends.append(total + first)
            total += first
            read += found.read
            for why, (where, count) in found.faults.items():
                add_fault(faults, why, where, count)
            if sum(count for _, count in faults.values()) > MOST_NAMED:
                break
        if faults or not ends:
            raise TextError(fault_lines(faults, read) or ["it has no examples"])
        if not total:
            raise TextError([f"none of its {len(ends):,} examples has a token: give texts that are not empty"])
        ids.commit()
        learned.commit()
    write_whole(entry.with_suffix(".ends"), [memoryview(np.array(ends, "<i8").tobytes())])
    return ExampleFacts(conversion.dtype, len(ends), total, max_id, conversion.opened.num_ids, digest.hexdigest())


def _read_facts(entry: Path) -> ExampleFacts | None:
    """Read the JSON file of an entry; None if the entry is missing or incomplete."""
    try:
        facts = ExampleFacts(**json.loads(entry.with_suffix(".json").read_bytes()))
        sizes = [entry.with_suffix(end).stat().st_size for end in (".ids", ".learned", ".ends")]
    except (OSError, ValueError, TypeError):
        return None
    whole = [facts.tokens * np.dtype(facts.dtype).itemsize, facts.tokens, facts.examples * 8]
    return facts if sizes == whole else None
