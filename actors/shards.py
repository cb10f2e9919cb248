"""Shards: safetensors files that an actor writes and reads. torch is imported where a tensor is made or read only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge
from safetensors import SafetensorError, safe_open

from raypar.actors.disk import CheckpointError, plain_size, told, write_whole
from raypar.actors.slices import Logical, Slice

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_MAX_HEADER = 100_000_000  # bytes: safetensors reads no longer one
_DTYPES = {
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


@dataclass(frozen=True)
class ShardFile:
    """A shard: its name in the checkpoint's folder, its bytes, and their sha256 in hex."""

    name: str
    size: Annotated[int, Ge(0)]
    sha256: str


def is_plain(name: str) -> bool:
    """Whether a name can only be that of a visible file in the folder itself."""
    return _NAME.fullmatch(name) is not None


def slice_of(name: str, tensor: Tensor, whole: Iterable[int] | None = None, offset: Iterable[int] | None = None) -> Slice:
    """What a tensor is of the logical tensor ``name``: all of it, unless that tensor's shape and an offset are given.

    Raises CheckpointError for a dtype that shards can't hold.
    """
    shape = tuple(tensor.shape)
    return Slice(
        tensor=name,
        dtype=_spelled(name, tensor),
        whole=shape if whole is None else tuple(whole),
        offset=(0,) * len(shape) if offset is None else tuple(offset),
        shape=shape,
    )


def write_shard(folder: Path, file: str, tensors: Mapping[str, Tensor]) -> ShardFile:
    """Write tensors, on any device and of any strides, as a shard: aside, synced, then renamed.

    They must not change meanwhile. Raises CheckpointError, and leaves nothing, if the disk or a tensor refuses.
    """
    if not is_plain(file):
        raise CheckpointError([f"{file!r} is no name for a shard: use letters, digits, '.', '_' and '-'"])
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))  # aligned, as mapped
    with told(f"{str(folder / file)!r} can't be written"):
        size, sha256 = write_whole(folder / file, _bytes_of(ordered))
    return ShardFile(file, size, sha256)


def read_shard(folder: Path, file: str, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a shard, or those that are asked for; nothing else is read.

    They are mapped, not copied: copy what outlives the file. Raises CheckpointError if there are no such tensors.
    """
    with _opened(folder, file, "pt") as shard:
        return {key: shard.get_tensor(key) for key in (shard.keys() if keys is None else keys)}


def read_header(folder: Path, file: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of each tensor of a shard; reads no tensor. Raises CheckpointError if it is no shard."""
    with _opened(folder, file, "np") as shard:
        parts = {key: shard.get_slice(key) for key in shard.keys()}  # noqa: SIM118  (it is no mapping)
        return {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in parts.items()}


def assemble(folder: Path, logical: Logical) -> Tensor:
    """A logical tensor, whole, on the host, in memory of its own. Raises CheckpointError if its slices don't make it."""
    import torch

    faults = list(logical.faults())
    parts = []
    for stored in [] if faults else logical.slices:
        part = read_shard(folder, stored.file, [stored.key])[stored.key]
        if (_spelled(stored.key, part), tuple(part.shape)) != (logical.dtype, stored.shape):
            faults.append(f"{stored} is {part.dtype} {list(part.shape)}, not {logical.dtype} {list(stored.shape)}")
        parts.append(part)
    if len({(stored.file, stored.key) for stored in logical.slices}) < len(logical.slices):
        faults.append("one stored tensor is taken for several slices")  # so it needs no more memory than the files have
    if faults:
        raise CheckpointError(faults)
    whole = torch.empty(logical.shape, dtype=parts[0].dtype)
    for stored, part in zip(logical.slices, parts, strict=True):
        whole[stored.index] = part
    return whole


class _opened:  # noqa: N801  (a context manager, used as a function)
    """A shard's safetensors handle; what it refuses is told as a CheckpointError."""

    def __init__(self, folder: Path, file: str, framework: str) -> None:
        self._path, self._what = folder / file, f"{file!r} can't be read as safetensors"
        if not is_plain(file):
            raise CheckpointError([f"{file!r} is no name for a shard"])
        with told(self._what):
            plain_size(self._path)
