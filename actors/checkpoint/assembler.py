"""Put logical tensors, or an actor's parts of them, together from the shards of a checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from raypar.actors.checkpoint.logical import DTYPES, AnyStored, Logical, Shape, Stored, tiling_faults
from raypar.actors.checkpoint.shards import read_header
from raypar.actors.errors import CheckpointError
from raypar.actors.machine.files import AT_ONCE, checkpoint_errors
from raypar.actors.safetensors_header import FileTensor, read_beginning
from raypar.actors.sharding import Box, Part, Sharding, Span, box_at, common, in_box, volume

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


class _Dense(NamedTuple):
    """A box of a logical tensor whose elements follow each other in a file.

    Attributes:
        box: The box.
        start: The box's first element, counted from that of the stored tensor.
        order: The dims in the order in the file, outermost first.
    """

    box: Box
    start: int
    order: tuple[int, ...]


class _Source(NamedTuple):
    """A stored tensor of which a part is read.

    Attributes:
        name: Its name in messages.
        file: Name of the shard.
        key: Name of the tensor in the shard.
        shape: Its shape in the shard.
        boxes: The boxes of the logical tensor that it consists of.
    """

    name: str
    file: str
    key: str
    shape: Shape
    boxes: tuple[_Dense, ...]


class Assembler:
    """Reads the tensors of a checkpoint or a snapshot from its shards.

    Files are read piece by piece, and only the rows that are needed, or the parts of long rows: it takes memory for the
    part that it returns and some megabytes. They are not mapped, because a system refuses to map files that are larger
    than its memory.

    Args:
        source: Where the shards are.
    """

    def __init__(self, source: ShardSource) -> None:
        self._source = source
        self._files: dict[str, dict[str, FileTensor]] = {}

    def read(self, logical: Logical, own: Sharding = _WHOLE) -> Tensor:
        """Read a logical tensor, or the slices of it that an actor holds; see ``read_part``."""
        return self.read_part(logical, own.part(logical.shape))

    def read_spans(self, logical: Logical, spans: Sequence[Sequence[Span]]) -> Tensor:
        """Read some indices of a logical tensor, given by dim; see ``read_part``."""
        return self.read_part(logical, Part(tuple(map(tuple, spans))))

    def read_part(self, logical: Logical, part: Part) -> Tensor:
        """Read a part of a logical tensor into new host memory. Files of other parts may be missing.

        Args:
            logical: The tensor.
            part: The part.

        Raises:
            CheckpointError: A file can't be read, or the slices do not have each of these elements once.
        """
        faults, sources = list[str](), dict[tuple[int, _Source], None]()
        for box in part.boxes():
            pieces = list[AnyStored]()
            for number, stored in enumerate(logical.slices):
                if (piece := common(box, box_at(stored.offset, stored.shape))) is not None:
                    start = tuple(first - at for (first, _), (at, _) in zip(piece, box, strict=True))
                    pieces.append(replace(stored, offset=start, shape=tuple(stop - first for first, stop in piece)))
                    sources |= dict.fromkeys((number, source) for source in _sources(stored, piece))
            faults += tiling_faults(tuple(stop - first for first, stop in box), pieces)
        every = [source for _, source in sources]
        faults = faults or self._source_faults(logical.dtype, every)
        CheckpointError.raise_if(faults)
        held = torch.empty(part.shape, dtype=_DTYPES[logical.dtype])
        pieces_of_part = part.pieces(held)
        for source in every:
            self._fill(pieces_of_part, source)
        return held

    def _source_faults(self, dtype: str, sources: Sequence[_Source]) -> list[str]:
        """Return why stored tensors are not those that are to be read."""
        faults = list[str]()
        for source in sources:
            found = self._located(source)
            if (found.dtype, found.shape) != (dtype, source.shape):
                wanted = f"{dtype} {list(source.shape)}"
                faults.append(f"{source.name} is {found.dtype} {list(found.shape)}, not {wanted}")
        if len({(source.file, source.key) for source in sources}) < len(sources):
            faults.append(
                "one stored tensor is taken for several slices"
            )  # so memory is bounded by the size of the files
        return faults

    def _located(self, source: _Source) -> FileTensor:
        """Return the position of a stored tensor in its file."""
        if source.file not in self._files:
            self._files[source.file] = self._read_file(source.file)
        found = self._files[source.file].get(source.key)
        if found is None:
            raise CheckpointError([f"{source.name} is not there"])
        return found

    def _read_file(self, file: str) -> dict[str, FileTensor]:
        """Read the positions of the tensors of a shard."""
        known = self._source.header(file)
        with checkpoint_errors(f"{file!r} can't be read"), self._source.open(file) as shard:
            found, _ = read_beginning(shard.fileno(), file)
        return {name: found[name] for name in known}

    def _fill(self, pieces: Sequence[tuple[Box, Tensor]], source: _Source) -> None:
        """Copy what a stored tensor has of a part into the views of the part's boxes."""
        at = self._located(source).start
        with checkpoint_errors(f"{source.name} can't be read"), self._source.open(source.file) as shard:
            reading = _Reading(shard.fileno(), source.name)
            for there, start, order in source.boxes:
                sizes = [there[dim][1] - there[dim][0] for dim in order]
                for box, view in pieces:
                    if (both := common(box, there)) is None:
                        continue
                    into = in_box(view, tuple((a - c, b - c) for (a, b), (c, _) in zip(both, box, strict=True)))
                    firsts = [both[dim][0] - there[dim][0] for dim in order]
                    reading.copy(into.permute(order), sizes, firsts, at + start * view.element_size())


class _Reading:
    """Reads boxes of dense tensors from an open file, some megabytes at a time.

    Args:
        descriptor: The file.
        name: The name of the stored tensor in messages.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor, self._name = descriptor, name

    def copy(self, into: Tensor, sizes: Sequence[int], firsts: Sequence[int], at: int) -> None:
        """Read a box of a dense tensor into a view, rows of dim 0 at a time, or parts of rows that are too long.

        Args:
            into: The view, of the box's shape.
            sizes: Shape of the dense tensor.
            firsts: The first index of the box along each dim.
            at: The tensor's first byte in the file.
        """
        if not sizes:
            into.copy_(self._read(into.dtype, [], at))
            return
        row = math.prod(sizes[1:]) * into.element_size()
        at += firsts[0] * row
        if row > AT_ONCE and len(sizes) > 1:
            for number in range(len(into)):
                self.copy(into[number], sizes[1:], firsts[1:], at + number * row)
            return
        others = tuple(slice(first, first + length) for first, length in zip(firsts[1:], into.shape[1:], strict=True))
        at_once = max(1, AT_ONCE // max(1, row))
        for number, rows in enumerate(into.split(at_once)):
            read = self._read(into.dtype, [len(rows), *sizes[1:]], at + number * at_once * row)
            rows.copy_(read[(slice(None), *others)])

    def _read(self, dtype: torch.dtype, shape: Sequence[int], at: int) -> Tensor:
        """Read a dense tensor that begins at a byte of the file."""
        raw = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        left = raw.numpy().data
        while left:
            got = os.preadv(self._descriptor, [left], at)
            if not got:
                raise CheckpointError([f"{self._name} can't be read: the file is shorter than its header says"])
            left, at = left[got:], at + got
        return raw.view(dtype).view(list(shape))


def _sources(stored: AnyStored, piece: Box) -> Iterator[_Source]:
    """Yield the stored tensors of a slice that have elements of a box of it.

    Raises:
        CheckpointError: The file of one is not known.
    """
    if isinstance(stored, Stored):
        dense = _Dense(box_at(stored.offset, stored.shape), 0, tuple(range(len(stored.shape))))
        yield _Source(str(stored), stored.file, stored.key, stored.shape, (dense,))
        return
    order = stored.order or tuple(range(len(stored.shape)))
    first = last = 0
    for dim in order:
        (start, stop), size = piece[dim], stored.shape[dim]
        first, last = first * size + start - stored.offset[dim], last * size + stop - 1 - stored.offset[dim]
    for rank in stored.cut.ranks(stored.elements, (first, last + 1)):
        span, file = stored.span(rank), stored.files.get(rank)
        assert span is not None
        if file is None:
            raise CheckpointError([f"{stored}: the span of replica {rank} is not there"])
        boxes, start = list[_Dense](), 0
        for box in stored.part(span).boxes():
            boxes.append(_Dense(box, start, order))
            start += volume(box)
        yield _Source(f"{stored.key!r} of {file!r}", file, stored.key, (span[1] - span[0],), tuple(boxes))
