"""Shards: the safetensors files that an actor writes and reads.

torch is imported only where a tensor is made or read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge
from safetensors import SafetensorError, safe_open

from raypar.actors.checkpoint.logical import DTYPES, AnyStored, Logical, Stored, StoredSpans, merged
from raypar.actors.errors import CheckpointError
from raypar.actors.machine.files import checkpoint_errors, plain_size, write_whole
from raypar.actors.models.tiles.tile_names import untiled
from raypar.actors.safetensors_header import beginning_of
from raypar.actors.sharding import Shard

if TYPE_CHECKING:
    from torch import Tensor

AtHand = Callable[[list["Tensor"]], AbstractContextManager[object]]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_PART = 8 << 20  # bytes of a tensor that are written at a time


@dataclass(frozen=True)
class ShardFile:
    """A shard file.

    Attributes:
        name: File name in the checkpoint's folder.
        size: Bytes.
        sha256: In hex.
    """

    name: str
    size: Annotated[int, Ge(0)]
    sha256: str


def is_plain(name: str) -> bool:
    """Return whether a name can only refer to a visible file in the folder itself (no path, no leading dot)."""
    return _NAME.fullmatch(name) is not None


def stored_in(file: str, name: str, tensor: Tensor, shard: Shard | None = None) -> Logical:
    """Describe a tensor in a shard file as a logical tensor with one slice.

    Args:
        file: Name of the shard file, in which the tensor has the logical tensor's name.
        name: Name of the logical tensor.
        tensor: The slice.
        shard: Which part of the logical tensor it is; None for all of it.

    Raises:
        CheckpointError: Shard files cannot hold the tensor's dtype.
    """
    shard = shard or Shard(tuple(tensor.shape))
    stored: AnyStored = Stored(file, name, shard.offset, tuple(tensor.shape))
    if shard.elements is not None:
        assert shard.cut is not None, "a span in a file belongs to a division"
        rank = next(shard.cut.ranks(math.prod(shard.shape), shard.elements))
        stored = StoredSpans(name, shard.offset, shard.shape, shard.order or (), shard.cut, {rank: file})
    return Logical(spelled_dtype(name, tensor), shard.whole, (stored,))


def logical_tensors(file: str, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> dict[str, Logical]:
    """Describe the tensors of a shard file as logical tensors; tiles are slices of one.

    Args:
        file: Name of the shard file.
        tensors: The tensors by name in the file.
        shards: By name, the part of its logical tensor that a tensor is; tensors without an entry are whole.

    Raises:
        CheckpointError: Shard files cannot hold a tensor's dtype.
    """
    found = dict[str, list[Logical]]()
    for name, tensor in tensors.items():
        found.setdefault(untiled(name), []).append(stored_in(file, name, tensor, shards.get(name)))
    return {whole: merged(parts) for whole, parts in found.items()}


def write_shard(
    folder: Path,
    file: str,
    tensors: Mapping[str, Tensor],
    spare: float = 0.0,
    at_hand: AtHand | None = None,
) -> ShardFile:
    """Write tensors as a shard: to a temporary file, which is synced and then renamed.

    Args:
        folder: Folder of the checkpoint.
        file: Name of the shard.
        tensors: Tensors by name, on any device and of any strides. They must not change meanwhile.
        spare: Seconds for which to use only idle cores (see ``files.exhaust``).
        at_hand: Returns a context in which some tensors, or parts of them, can be read; None if they always can.

    Raises:
        CheckpointError: The name, a tensor or the disk does not allow it. No file remains.
    """
    if not is_plain(file):
        raise CheckpointError([f"{file!r} is no name for a shard: use letters, digits, '.', '_' and '-'"])
    # Large dtypes first, so that every mapped tensor is aligned.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    with checkpoint_errors(f"{str(folder / file)!r} can't be written"):
        size, sha256 = write_whole(folder / file, _bytes_of(ordered, at_hand), spare)
    return ShardFile(file, size, sha256)


def read_shard(folder: Path, file: str, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read tensors of a shard. They are memory-mapped, not copied: copy what must outlive the file.

    Args:
        folder: Folder of the checkpoint.
        file: Name of the shard.
        keys: Names of the tensors; None for all.

    Raises:
        CheckpointError: The file is no shard or has no such tensor.
    """
    with _opened(folder, file, "pt") as shard:
        return {key: shard.get_tensor(key) for key in (shard.keys() if keys is None else keys)}


def read_header(folder: Path, file: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each tensor of a shard without reading them.

    Raises CheckpointError if it is no shard.
    """
    with _opened(folder, file, "np") as shard:
        parts = {key: shard.get_slice(key) for key in shard.keys()}  # noqa: SIM118  (shard is not a mapping)
        return {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in parts.items()}


@contextmanager
def _opened(folder: Path, file: str, framework: str) -> Iterator[Any]:
    """Open a shard with safetensors, which checks the header against the file.

    Raises CheckpointError if it is refused.
    """
    if not is_plain(file):
        raise CheckpointError([f"{file!r} is no name for a shard: use letters, digits, '.', '_' and '-'"])
    refused = f"{file!r} can't be read as safetensors"
    try:
        with checkpoint_errors(refused):
            plain_size(folder / file)
            with safe_open(str(folder / file), framework=framework) as shard:
                yield shard
    except (SafetensorError, MemoryError) as error:
        raise CheckpointError([f"{refused} ({error})"]) from error


def _bytes_of(tensors: Mapping[str, Tensor], at_hand: AtHand | None) -> Iterator[memoryview]:
    """Yield the file's bytes: length of the header, header, then each tensor, in parts of a few megabytes."""
    import torch

    kinds = [(name, spelled_dtype(name, one), one.shape, one.nbytes) for name, one in tensors.items()]
    yield memoryview(beginning_of(kinds))
    for tensor in tensors.values():
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        for part in flat.split(max(1, _PART // flat.element_size())):
            with nullcontext() if at_hand is None else at_hand([part]):
                yield part.cpu().contiguous().view(torch.uint8).numpy().data


def spelled_dtype(name: str, tensor: Tensor) -> str:
    """Return a tensor's dtype in safetensors' spelling.

    Raises CheckpointError if safetensors cannot hold the tensor.
    """
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in DTYPES or str(tensor.layout) != "torch.strided" or tensor.is_meta:
        form = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise CheckpointError([f"{name!r} is a {form} tensor of {kind}, which safetensors can't hold"])
    return DTYPES[kind]
