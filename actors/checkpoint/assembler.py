"""Put logical tensors, or an actor's parts of them, together from the shards of a checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from itertools import product
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from raypar.actors.checkpoint.logical import DTYPES, Logical, Shape, Stored, tiling_faults
from raypar.actors.checkpoint.shards import read_header
from raypar.actors.errors import CheckpointError
from raypar.actors.machine.files import AT_ONCE, checkpoint_errors
from raypar.actors.safetensors_header import FileTensor, read_beginning
from raypar.actors.sharding import Sharding

_DTYPES: Mapping[str, torch.dtype] = {spelled: getattr(torch, name) for name, spelled in DTYPES.items()}
_WHOLE = Sharding()


class ShardSource(Protocol):
    """Where shards are read from."""

    def header(self, file: str) -> Mapping[str, tuple[str, Shape]]:
        """Return dtype and shape of each tensor of a shard. Raises CheckpointError if it is none."""

    def open(self, file: str) -> FileIO:
        """Open a shard for reading. Raises OSError."""


class ShardFolder:
    """The shards of a checkpoint in a folder.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def header(self, file: str) -> Mapping[str, tuple[str, Shape]]:
        """Return dtype and shape of each tensor of a shard, once safetensors has found it sound."""
        return read_header(self._folder, file)

    def open(self, file: str) -> FileIO:
        """Open a shard for reading. Raises OSError."""
        return (self._folder / file).open("rb", buffering=0)


class _Common(NamedTuple):
    """The intersection of a stored slice and an actor's part along a dim.

    Attributes:
        target: First index in the part.
        start: First index in the slice.
        length: Number of indices.
    """

    target: int
    start: int
    length: int


class Assembler:
    """Reads the tensors of a checkpoint or a snapshot from its shards.

    Files are read piece by piece, and only the rows that are needed: it takes memory for the part that it returns and
    some megabytes. They are not mapped, because a system refuses to map files that are larger than its memory.

    Args:
        source: Where the shards are.
    """

    def __init__(self, source: ShardSource) -> None:
        self._source = source
        self._files: dict[str, dict[str, FileTensor]] = {}

    def read(self, logical: Logical, own: Sharding = _WHOLE) -> Tensor:
        """Read a logical tensor, or a part of it, into new host memory. Slices of other parts may be missing.

        Args:
            logical: The tensor.
            own: The part of it to read.

        Raises:
            CheckpointError: A file can't be read, or its slices do not fit together.
        """
        return self.read_spans(logical, [own[dim].spans(length) for dim, length in enumerate(logical.shape)])

    def read_spans(self, logical: Logical, spans: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
        """Read some indices of a logical tensor into new host memory.

        Args:
            logical: The tensor.
            spans: For each dim, ranges of indices: the first one, and the one after the last.

        Raises:
            CheckpointError: A file can't be read, or the slices do not have each of these elements once.
        """
        shape = tuple(sum(stop - start for start, stop in dim) for dim in spans)
        there, pieces = list[tuple[Stored, list[list[_Common]]]](), list[Stored]()
        for stored in logical.slices:
            by_dim = [
                list(_common(dim, offset, size))
                for dim, offset, size in zip(spans, stored.offset, stored.shape, strict=True)
            ]
            if all(by_dim):
                there.append((stored, by_dim))
                pieces += [_piece(stored, chosen) for chosen in product(*by_dim)]
        faults = list(tiling_faults(shape, pieces))
        for stored, _ in [] if faults else there:
            found = self._located(stored)
            if (found.dtype, found.shape) != (logical.dtype, stored.shape):
                wanted = f"{logical.dtype} {list(stored.shape)}"
                faults.append(f"{stored} is {found.dtype} {list(found.shape)}, not {wanted}")
        if len({(stored.file, stored.key) for stored, _ in there}) < len(there):
            faults.append(
                "one stored tensor is taken for several slices"
            )  # so memory is bounded by the size of the files
        CheckpointError.raise_if(faults)
        part = torch.empty(shape, dtype=_DTYPES[logical.dtype])
        for stored, by_dim in there:
            self._fill(part, stored, by_dim)
        return part

    def _located(self, stored: Stored) -> FileTensor:
        """Return the position of a slice in its file."""
        if stored.file not in self._files:
            self._files[stored.file] = self._read_file(stored.file)
        found = self._files[stored.file].get(stored.key)
        if found is None:
            raise CheckpointError([f"{stored} is not there"])
        return found

    def _read_file(self, file: str) -> dict[str, FileTensor]:
        """Read the positions of the tensors of a shard."""
        known = self._source.header(file)
        with checkpoint_errors(f"{file!r} can't be read"), self._source.open(file) as shard:
            found, _ = read_beginning(shard.fileno(), file)
        return {name: found[name] for name in known}

    def _fill(self, part: Tensor, stored: Stored, common: Sequence[Sequence[_Common]]) -> None:
        """Copy the intersection of a stored slice and a part, which is not empty and given by dim, into the part."""
        found = self._located(stored)
        if not common:
            part.copy_(self._rows(stored, found, part.dtype, 0, 1)[0])
            return
        at_once = max(1, AT_ONCE // max(1, math.prod(found.shape[1:]) * part.element_size()))
        for target, start, length in common[0]:
            for row in range(0, length, at_once):
                count = min(at_once, length - row)
                rows = self._rows(stored, found, part.dtype, start + row, count)
                for others in product(*common[1:]):
                    into = tuple(slice(one.target, one.target + one.length) for one in others)
                    taken = tuple(slice(one.start, one.start + one.length) for one in others)
                    part[(slice(target + row, target + row + count), *into)] = rows[(slice(None), *taken)]

    def _rows(self, stored: Stored, found: FileTensor, dtype: torch.dtype, first: int, count: int) -> Tensor:
        """Read consecutive rows, along dim 0, of a stored tensor; a scalar is one row."""
        shape = found.shape[1:]
        size = math.prod(shape) * dtype.itemsize
        raw = torch.empty(count * size, dtype=torch.uint8)
        left, at = raw.numpy().data, found.start + first * size
        with checkpoint_errors(f"{stored} can't be read"), self._source.open(stored.file) as shard:
            while left:
                got = os.preadv(shard.fileno(), [left], at)
                if not got:
                    raise CheckpointError([f"{stored} can't be read: the file is shorter than its header says"])
                left, at = left[got:], at + got
        return raw.view(dtype).view(count, *shape)


def _piece(stored: Stored, common: Sequence[_Common]) -> Stored:
    """Return the intersection of a stored slice and an actor's part, positioned in the part."""
    return Stored(stored.file, stored.key, tuple(one.target for one in common), tuple(one.length for one in common))


def _common(spans: Sequence[tuple[int, int]], offset: int, size: int) -> Iterator[_Common]:
    """Yield the intersections of spans of a dim with a slice that has an offset and a size."""
    target = 0
    for start, stop in spans:
        low, high = max(start, offset), min(stop, offset + size)
        if low < high:
            yield _Common(target + low - start, low - offset, high - low)
        target += stop - start
