"""Logical tensors and the slices in which they are stored, so that a checkpoint does not depend on the layout."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import product
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le

from raypar.actors.sharding import ElementCut, Part, Span

Size = Annotated[int, Ge(0), Le(1 << 48)]
Shape = tuple[Size, ...]

DTYPES = {  # torch's name to safetensors'
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_BITS = re.compile(r"[0-9]+")  # in the name of a dtype; BOOL has a byte
_MAX_DIMS = 64  # torch's own limit
_MAX_SLICES = 1 << 16  # of one tensor
_MAX_CUT_DIMS = 4  # dims that slices divide, up to which corners are counted; sharding divides at most three
_MAX_ELEMENTS = 1 << 60


@dataclass(frozen=True)
class Stored:
    """A slice on disk.

    Attributes:
        file: Name of the shard.
        key: Name of the tensor in the shard.
        offset: Where the slice begins in each dim of the logical tensor.
        shape: Shape of the slice.
    """

    file: str
    key: str
    offset: Shape
    shape: Shape

    def __str__(self) -> str:
        return f"{self.key!r} of {self.file!r}"


class FileTable:
    """How pydantic reads and writes the files of ``StoredSpans``: as the number of a table.

    The context of a validation has "table", which returns the files of a number; that of a serialization has "number",
    which returns the number of files.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> Any:
        """Return the schema: see pydantic. The actors do not import pydantic."""
        from pydantic_core import core_schema

        return core_schema.with_info_plain_validator_function(
            lambda number, about: about.context["table"](number),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda files, about: about.context["number"](files), info_arg=True
            ),
        )


@dataclass(frozen=True)
class StoredSpans:
    """A slice of which several replicas have written a span of consecutive elements each, in memory order.

    Attributes:
        key: Name of the span in each shard.
        offset: Where the slice begins in each dim of the logical tensor.
        shape: Shape of the slice.
        order: The dims in memory order, outermost first; () for row-major.
        cut: How the elements are divided.
        files: By rank of a replica, the name of the shard with its span. Those that are not known are missing.
    """

    key: str
    offset: Shape
    shape: Shape
    order: tuple[Size, ...]
    cut: ElementCut
    files: Annotated[Mapping[int, str], FileTable]

    def __str__(self) -> str:
        return f"{self.key!r} in spans of {self.cut.num_ranks} files"

    @property
    def elements(self) -> int:
        """Number of elements of the slice."""
        return math.prod(self.shape)

    def span(self, rank: int) -> Span | None:
        """Return the span of a replica; None if it has nothing."""
        return self.cut.span(self.elements, rank)

    def part(self, span: Span) -> Part:
        """Return a span as a part of the logical tensor."""
        spans = tuple(((start, start + size),) for start, size in zip(self.offset, self.shape, strict=True))
        return Part(spans, span, self.order or None)

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the order of the dims and with the cut."""
        if self.order and sorted(self.order) != list(range(len(self.shape))):
            yield f"{self} has the dims in the order {list(self.order)[:10]}, which does not name each once"
        if self.cut.first >= self.cut.num_ranks:
            yield f"{self} begins at replica {self.cut.first}, and there are {self.cut.num_ranks}"


AnyStored = Stored | StoredSpans


@dataclass(frozen=True)
class Logical:
    """A logical tensor and the stored slices that make it up; each element must be in exactly one slice.

    Attributes:
        dtype: In safetensors' spelling.
        shape: Shape of the logical tensor.
        slices: The stored slices.
    """

    dtype: str
    shape: Shape
    slices: tuple[AnyStored, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements; 0 if the dtype is none."""
        bits = _BITS.search(self.dtype)
        return math.prod(self.shape) * (int(bits[0]) // 8 if bits else 1) if self.dtype in DTYPES.values() else 0

    def faults(self) -> Iterator[str]:
        """Yield what is wrong: a bad dtype or shape, and slices that leave the tensor, overlap or miss elements.

        Missing elements may go unreported if other slices overlap.
        """
        if self.dtype not in DTYPES.values():
            yield f"its dtype {self.dtype[:20]!r} is none of {', '.join(DTYPES.values())}"
        if len(self.shape) > _MAX_DIMS or math.prod(max(size, 1) for size in self.shape) > _MAX_ELEMENTS:
            yield f"its shape {list(self.shape)} is more than a tensor can have"
        elif not 1 <= len(self.slices) <= _MAX_SLICES:
            yield f"it has {len(self.slices)} slices, not 1 to {_MAX_SLICES}"
        else:
            inside = []
            for stored in self.slices:
                if self._holds(stored):
                    inside.append(stored)
                else:
                    position = f"offset {list(stored.offset)} and shape {list(stored.shape)}"
                    yield f"{stored} has {position}, which leaves the tensor's shape {list(self.shape)}"
                yield from stored.faults() if isinstance(stored, StoredSpans) else ()
            yield from tiling_faults(self.shape, inside)

    def _holds(self, stored: AnyStored) -> bool:
        if not len(stored.offset) == len(stored.shape) == len(self.shape):
            return False
        return all(o + s <= size for o, s, size in zip(stored.offset, stored.shape, self.shape, strict=True))


def merged(parts: Sequence[Logical]) -> Logical:
    """Put the slices of one logical tensor together, and the files of spans of one slice.

    Args:
        parts: The tensor as several files have it: of one dtype and shape, with other slices.
    """
    boxes, spans = list[AnyStored](), dict[tuple[object, ...], dict[int, str]]()
    first = dict[tuple[object, ...], StoredSpans]()
    for stored in (one for part in parts for one in part.slices):
        if isinstance(stored, Stored):
            boxes.append(stored)
        else:
            of = stored.key, stored.offset, stored.shape, stored.order, stored.cut
            first.setdefault(of, stored)
            spans.setdefault(of, {}).update(stored.files)
    divided = (replace(stored, files=spans[of]) for of, stored in first.items())
    return Logical(parts[0].dtype, parts[0].shape, (*boxes, *divided))


def in_files(logical: Logical, name: Callable[[str], str]) -> Logical:
    """Return a logical tensor whose files have other names: ``name`` returns the new one of each."""
    return replace(logical, slices=tuple(_renamed(stored, name) for stored in logical.slices))


def _renamed(stored: AnyStored, name: Callable[[str], str]) -> AnyStored:
    if isinstance(stored, Stored):
        return replace(stored, file=name(stored.file))
    return replace(stored, files={rank: name(file) for rank, file in stored.files.items()})


def plain_slice(stored: AnyStored) -> list[object]:
    """Return a slice as plain data, with its file or files last; ``slice_from`` reads it."""
    if isinstance(stored, Stored):
        return [stored.key, stored.offset, stored.shape, stored.file]
    return [stored.key, stored.offset, stored.shape, stored.order, astuple(stored.cut), [*stored.files.items()]]


def slice_from(plain: Sequence[Any]) -> AnyStored:
    """Return the slice of plain data."""
    key, offset, shape, *rest = plain
    if len(rest) == 1:
        return Stored(rest[0], key, tuple(offset), tuple(shape))
    order, cut, files = rest
    return StoredSpans(key, tuple(offset), tuple(shape), tuple(order), ElementCut(*cut), dict(files))


def tiling_faults(shape: Shape, slices: Sequence[AnyStored]) -> Iterator[str]:
    """Yield which slices of a shape overlap, and how many elements are in none; missing ones only if none overlap.

    Args:
        shape: Shape of a tensor, or of a part of one.
        slices: Slices that do not leave it.
    """
    if _tile(shape, slices):
        return
    yield from _overlaps(slices, len(shape))
    missing = math.prod(shape) - sum(math.prod(stored.shape) for stored in slices)
    if missing > 0:
        yield f"{missing} of its {math.prod(shape)} elements are in no slice"


def _tile(shape: Shape, slices: Sequence[AnyStored]) -> bool:
    """Return whether slices, none of which leaves a shape, have each element once; False if unknown.

    A box is determined by its corners with alternating signs, and so is a sum of boxes: it is the whole exactly if all
    corners but those of the whole cancel out. This takes time in proportion to the number of slices.
    """
    cut = [
        dim
        for dim, size in enumerate(shape)
        if any(stored.offset[dim] != 0 or stored.shape[dim] != size for stored in slices)
    ]
    if len(cut) > _MAX_CUT_DIMS or 0 in shape:
        return False
    corners = Counter[tuple[int, ...]]()
    whole = Stored("", "", (0,) * len(shape), shape)
    both: tuple[tuple[int, Sequence[AnyStored]], ...] = (1, slices), (-1, [whole])
    for sign, boxes in both:
        for box in boxes:
            for ends in product((0, 1), repeat=len(cut)):
                corner = tuple(box.offset[dim] + end * box.shape[dim] for dim, end in zip(cut, ends, strict=True))
                corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())


def _overlaps(slices: Sequence[AnyStored], dims: int) -> Iterator[str]:
    """Yield, for each slice that overlaps an earlier one, a fault that names the first such pair."""
    starts = np.array([stored.offset for stored in slices], np.int64).reshape(len(slices), dims)
    ends = starts + np.array([stored.shape for stored in slices], np.int64).reshape(len(slices), dims)
    for index in range(1, len(slices)):
        common = np.minimum(ends[:index], ends[index]) > np.maximum(starts[:index], starts[index])
        if (both := np.flatnonzero(common.all(axis=1))).size:
            yield f"{slices[both[0]]} and {slices[index]} overlap"
