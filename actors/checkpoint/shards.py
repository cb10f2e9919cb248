"""Shards: safetensors files that an actor writes and reads. torch is imported where a tensor is made or read only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge
from safetensors import SafetensorError, safe_open

from raypar.actors.checkpoint.logical import DTYPES, Logical, Slice
from raypar.actors.errors import CheckpointError
from raypar.actors.files import plain_size, told, write_whole

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_MAX_HEADER = 100_000_000  # bytes: safetensors reads no longer one


@dataclass(frozen=True)
class ShardFile:
    """A shard: its name in the checkpoint's folder, its bytes, and their sha256 in hex."""

    name: str
    size: Annotated[int, Ge(0)]
    sha256: str


def is_plain(name: str) -> bool:
    """Whether a name can only be that of a visible file in the folder itself."""
    return _NAME.fullmatch(name) is not None


def slice_of(
    name: str, tensor: Tensor, whole: Iterable[int] | None = None, offset: Iterable[int] | None = None
) -> Slice:
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


def write_shard(folder: Path, file: str, tensors: Mapping[str, Tensor], spare: float = 0.0) -> ShardFile:
    """Write tensors, on any device and of any strides, as a shard: aside, synced, then renamed.

    For ``spare`` seconds it takes only cores that nothing else wants. The tensors must not change meanwhile. Raises
    CheckpointError, and leaves nothing, if the disk or a tensor refuses.
    """
    if not is_plain(file):
        raise CheckpointError([f"{file!r} is no name for a shard: use letters, digits, '.', '_' and '-'"])
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))  # aligned, as mapped
    with told(f"{str(folder / file)!r} can't be written"):
        size, sha256 = write_whole(folder / file, _bytes_of(ordered), spare)
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
    """A logical tensor, whole, on the host, in memory of its own. Raises CheckpointError if slices are amiss."""
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


@contextmanager
def _opened(folder: Path, file: str, framework: str) -> Iterator[Any]:
    """safetensors' own handle, which checks the header against the file; what it refuses is a CheckpointError."""
    if not is_plain(file):
        raise CheckpointError([f"{file!r} is no name for a shard: use letters, digits, '.', '_' and '-'"])
    refused = f"{file!r} can't be read as safetensors"
    try:
        with told(refused):
            plain_size(folder / file)
            with safe_open(str(folder / file), framework=framework) as shard:
                yield shard
    except (SafetensorError, MemoryError) as error:
        raise CheckpointError([f"{refused} ({error})"]) from error


def _bytes_of(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The file's bytes: the header's length, the header, then each tensor's, of which one at a time is copied."""
    import torch

    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _spelled(name, tensor), "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise CheckpointError([f"{len(tensors)} tensors are too many for one shard: write several"])
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        yield plain.reshape(-1).view(torch.uint8).numpy().data


def _spelled(name: str, tensor: Tensor) -> str:
    """A tensor's dtype in safetensors' words."""
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in DTYPES or str(tensor.layout) != "torch.strided" or tensor.is_meta:
        form = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise CheckpointError([f"{name!r} is a {form} tensor of {kind}, which safetensors can't hold"])
    return DTYPES[kind]
