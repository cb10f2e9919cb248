"""The headers of safetensors files: the JSON at their beginning that says which bytes are which tensor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from raypar.actors.errors import CheckpointError

ITEM = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of an element, of the dtypes that weights may have
_LENGTH = 8  # bytes of the number at the beginning of a file: the length of its header
_LONGEST = 100_000_000  # bytes; safetensors rejects a longer header
_METADATA = "__metadata__"


class FileTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        file: Name of the file.
        dtype: In safetensors' spelling.
        shape: Its shape.
        start: Its first byte in the file.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int


def beginning_of(
    tensors: Iterable[tuple[str, str, Sequence[int], int]],
    metadata: Mapping[str, str] | None = None,
    alignment: int = 8,
) -> bytes:
    """Return the beginning of a file: the length of its header, and the header. The tensors' bytes follow in order.

    Args:
        tensors: Name, dtype in safetensors' spelling, shape and number of bytes of each tensor.
        metadata: Texts to keep beside the tensors.
        alignment: The beginning is as long as a multiple of so many bytes.

    Raises:
        CheckpointError: The header is longer than safetensors reads.
    """
    header: dict[str, Any] = {} if metadata is None else {_METADATA: metadata}
    end = 0
    for name, dtype, shape, size in tensors:
        start, end = end, end + size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(_LENGTH + len(text)) % alignment)
    if len(text) > _LONGEST:
        raise CheckpointError([f"{len(header)} tensors are too many for one file: write several"])
    return len(text).to_bytes(_LENGTH, "little") + text


def read_beginning(descriptor: int, file: str) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Return the tensors of a safetensors file in their order in the header, and the metadata.

    Args:
        descriptor: The opened file.
        file: Its name.

    Raises:
        CheckpointError: It is no safetensors file, contradicts itself, or ends early.
        OSError: It can't be read.
    """
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, _LENGTH, 0), "little")
    if length > min(_LONGEST, size - _LENGTH):
        raise CheckpointError([f"{file!r} is no safetensors file, or ends in its header: copy it again"])
    data = _LENGTH + length
    try:
        plain = json.loads(os.pread(descriptor, length, _LENGTH))
        metadata = dict(plain.pop(_METADATA, None) or {})
        found = {name: _tensor_of(file, entry, data) for name, entry in plain.items()}
        end = data + max((entry["data_offsets"][1] for entry in plain.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError([f"{file!r} has a broken header ({error}): copy it again"]) from error
    if end > size:
        raise CheckpointError([f"{file!r} ends early, {end - size} bytes are missing: copy it again"])
    return found, metadata


def _tensor_of(file: str, entry: Mapping[str, Any], data: int) -> FileTensor:
    """Read an entry of a header. Raises ValueError, KeyError or TypeError if it contradicts itself."""
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not all(isinstance(size, int) and size >= 0 for size in (*shape, start, end)):
        raise ValueError("a size is no whole number")
    if dtype in ITEM and end - start != math.prod(shape) * ITEM[dtype]:
        raise ValueError("a tensor has not the bytes that its shape needs")
    return FileTensor(file, str(dtype), shape, data + start)
