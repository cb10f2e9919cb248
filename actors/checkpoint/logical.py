"""Logical tensors and the slices in which they are stored, so that a checkpoint does not depend on the layout."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

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
    slices: tuple[Stored, ...]

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
            yield from tiling_faults(self.shape, inside)

    def _holds(self, stored: Stored) -> bool:
        if not len(stored.offset) == len(stored.shape) == len(self.shape):
            return False
        return all(o + s <= size for o, s, size in zip(stored.offset, stored.shape, self.shape, strict=True))


def tiling_faults(shape: Shape, slices: Sequence[Stored]) -> Iterator[str]:
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


def _tile(shape: Shape, slices: Sequence[Stored]) -> bool:
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
    for sign, boxes in ((1, slices), (-1, [whole])):
        for box in boxes:
            for ends in product((0, 1), repeat=len(cut)):
                corner = tuple(box.offset[dim] + end * box.shape[dim] for dim, end in zip(cut, ends, strict=True))
                corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())


def _overlaps(slices: Sequence[Stored], dims: int) -> Iterator[str]:
    """Yield, for each slice that overlaps an earlier one, a fault that names the first such pair."""
    starts = np.array([stored.offset for stored in slices], np.int64).reshape(len(slices), dims)
    ends = starts + np.array([stored.shape for stored in slices], np.int64).reshape(len(slices), dims)
    for index in range(1, len(slices)):
        common = np.minimum(ends[:index], ends[index]) > np.maximum(starts[:index], starts[index])
        if (both := np.flatnonzero(common.all(axis=1))).size:
            yield f"{slices[both[0]]} and {slices[index]} overlap"
