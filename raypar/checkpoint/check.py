"""Check whether a checkpoint is sound. Nothing in it is trusted or executed."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from raypar.actors.checkpoint.logical import Logical, Stored, StoredSpans
from raypar.actors.checkpoint.shards import ShardFile, read_header
from raypar.actors.errors import CheckpointError
from raypar.actors.machine.files import checkpoint_errors, plain_size, read_plain, sha256_of
from raypar.checkpoint.manifest import MANIFEST, MAX_BYTES, Manifest, decode
from raypar.config.fields import short_repr
from raypar.paths import step_of
from raypar.schedules.schedule import first_faults

ExpectedTensors = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape of each tensor of a shard, by key


def checkpoint_faults(path: Path) -> list[str]:
    """Read every byte of a checkpoint and return its faults.

    Args:
        path: The checkpoint's folder.

    Returns:
        One sentence per fault, of many only the first ones; [] if the checkpoint is sound.
    """
    try:
        verified(path)
    except CheckpointError as error:
        return error.faults
    return []


def verified(path: Path) -> Manifest:
    """Read every byte of a checkpoint and return its manifest. Raises CheckpointError with the faults if it has any."""
    manifest, faults = look(path)
    if manifest is not None:
        faults += first_faults(file_faults(path, manifest, digests=True))
    if manifest is None or faults:
        raise CheckpointError(faults)
    return manifest


def look(path: Path) -> tuple[Manifest | None, list[str]]:
    """Read a checkpoint's manifest, without its shards.

    Args:
        path: The checkpoint's folder.

    Returns:
        The manifest, or None if it can't be read, and its faults.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            return None, [f"{str(path)!r} is no folder"]
        with checkpoint_errors(f"{MANIFEST} can't be read"):
            raw = read_plain(path / MANIFEST, MAX_BYTES)
    except CheckpointError as error:
        return None, error.faults
    manifest, faults = decode(raw)
    if manifest is not None and step_of(path.name) != manifest.step:
        faults.append(f"the folder is named {path.name!r}, but it was saved after step {manifest.step}")
    return manifest, faults


def file_faults(path: Path, manifest: Manifest, *, digests: bool) -> Iterator[str]:
    """Yield the differences between a checkpoint's files and its manifest.

    Args:
        path: The checkpoint's folder.
        manifest: Its manifest.
        digests: Whether to read all bytes and compare the sha256. If not, only sizes and headers are compared.
    """
    listed = {file.name for file in manifest.files}
    try:
        with checkpoint_errors(f"{str(path)!r} can't be listed"):
            there = set(os.listdir(path)) - {MANIFEST}  # noqa: PTH208  (names, not paths)
    except CheckpointError as error:
        yield from error.faults
        return
    yield from (f"{short_repr(name)} is in the folder, but not in the manifest" for name in sorted(there - listed))
    expected = _Expected(manifest.tensors)
    for file in manifest.files:
        if file.name not in there:  # this also covers names that lead out of the folder
            yield f"{file.name!r} is missing"
        else:
            yield from expected.faults(file.name)
            yield from _shard_faults(path, file, expected.of(file.name), digests)


class _Expected:
    """The tensors that shards should have, by file; those of spans are listed for one file at a time.

    Args:
        tensors: All logical tensors.
    """

    def __init__(self, tensors: Mapping[str, Logical]) -> None:
        self._whole = defaultdict[str, ExpectedTensors](dict)
        self._spans = dict[int, list[tuple[str, StoredSpans]]]()  # by the identity of the table of files
        self._tables = defaultdict[str, list[tuple[int, int]]](list)  # by file, tables and ranks in them
        for logical in tensors.values():
            for stored in logical.slices:
                if isinstance(stored, Stored):
                    self._whole[stored.file][stored.key] = (logical.dtype, stored.shape)
                    continue
                table = id(stored.files)
                if table not in self._spans:
                    for rank, file in stored.files.items():
                        self._tables[file].append((table, rank))
                self._spans.setdefault(table, []).append((logical.dtype, stored))

    def of(self, file: str) -> ExpectedTensors:
        """Return dtype and shape of each tensor of a shard, by key."""
        return self._whole.get(file, {}) | dict(self._spans_of(file))

    def faults(self, file: str) -> Iterator[str]:
        """Yield the keys of a shard that are taken for several slices, if one of these is in spans."""
        taken = {*self._whole.get(file, {})}
        for key, _ in self._spans_of(file):
            if key in taken:
                yield f"{short_repr(key)} of {file!r} is taken for several slices"
            taken.add(key)

    def _spans_of(self, file: str) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
        for table, rank in self._tables.get(file, ()):
            for dtype, stored in self._spans[table]:
                if (span := stored.span(rank)) is not None:
                    yield stored.key, (dtype, (span[1] - span[0],))


def _shard_faults(path: Path, file: ShardFile, expected: ExpectedTensors, digests: bool) -> Iterator[str]:
    try:
        with checkpoint_errors(f"{file.name!r} can't be read"):
            if (size := plain_size(path / file.name)) != file.size:
                yield f"{file.name!r} has {size} bytes, not {file.size}"
                return
            if digests and sha256_of(path / file.name) != file.sha256:
                yield f"{file.name!r} was changed: its sha256 is another one"
                return
        header = read_header(path, file.name)
    except CheckpointError as error:
        yield from error.faults
        return
    for key in sorted(header.keys() | expected.keys()):
        there, wanted = header.get(key), expected.get(key)
        if there is None:
            yield f"{file.name!r} has no tensor {short_repr(key)}"
        elif wanted is None:
            yield f"{file.name!r} has a tensor {short_repr(key)}, but the manifest takes it for no slice"
        elif there != wanted:
            yield f"{short_repr(key)} of {file.name!r} is {_words(*there)}, but {_words(*wanted)} in the manifest"


def _words(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
