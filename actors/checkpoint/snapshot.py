"""Snapshots of an actor's state: copied between two steps, then written to disk while the next steps run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType

import torch
from torch import Tensor

from raypar.actors.checkpoint.assembler import Assembler, ShardSource
from raypar.actors.checkpoint.logical import Logical
from raypar.actors.checkpoint.reports import Written
from raypar.actors.checkpoint.shards import logical_tensors, write_shard
from raypar.actors.errors import CheckpointError, OffloadError
from raypar.actors.machine.offload_storage import OffloadStorage
from raypar.actors.models.tiles.tile_names import untiled
from raypar.actors.sharding import Part, Shape, Shard
from raypar.actors.tensors import nbytes

SCALER = "loss_scale"  # the checkpoint's name of the numbers of a LossScaler
AVERAGE = "ema"  # key of a weight's moving average among the states of its optimizer
_ALIGNMENT = 64  # bytes
# Bytes per second: if writing on idle cores alone is slower, the rest of a shard is written at full speed.
_SLOWEST = 50e6
_ALL_WHOLE: Mapping[str, Shard] = MappingProxyType({})

# (name of a weight, its optimizer state or "" for the weight itself) -> the tensor; None if it was not saved.
Read = Callable[[str, str], Tensor | None]


def logical_name(weight: str, kept: str = "") -> str:
    """Return the checkpoint's name of a weight, or of its optimizer state ``kept``, such as ``exp_avg``."""
    return f"optim.{weight}.{kept}" if kept else weight


def buffer_name(dp: int, buffer: str) -> str:
    """Return the checkpoint's name of a layer's buffer. Each data-parallel replica has its own buffers."""
    return f"buffers.dp{dp}.{buffer}"


class Copies:
    """Copies of an actor's state: ``take`` one between two steps, and ``write`` it to disk in another thread.

    There is one copy at a time. Its memory is reused, because memory that is new to the process takes longer to fill.

    Args:
        storage: Where the actor keeps its state: copies are stored there too if it is off the device, else on the host.
    """

    def __init__(self, storage: OffloadStorage) -> None:
        self._storage = storage
        self._taken: SimpleQueue[tuple[dict[str, Tensor], Mapping[str, Shard]] | Exception] = SimpleQueue()
        self._maker = ThreadPoolExecutor(1)
        self._memory: Future[Tensor] | None = None

    def make_room(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Allocate the memory for copies of these tensors, in a thread."""
        size = sum(_padded(tensor) for _, tensor in tensors)
        self._memory = self._maker.submit(
            _touched if not self._storage.is_off_device else self._allocated_off_device, size
        )

    def take(self, tensors: Iterable[tuple[str, Tensor]], shards: Mapping[str, Shard] = _ALL_WHOLE) -> None:
        """Copy tensors to the host. Errors are kept for ``write`` to raise.

        Args:
            tensors: Pairs of a logical name and a tensor.
            shards: By name, the part of its logical tensor that a tensor is; tensors without an entry are whole.
        """
        try:
            state = dict(tensors)
            if self._memory is None or self._memory.result().nbytes < sum(map(_padded, state.values())):
                self.make_room(state.items())
            assert self._memory is not None
            memory, start, copies = self._memory.result(), 0, dict[str, Tensor]()
            for name, tensor in state.items():
                copies[name] = memory[start : start + nbytes(tensor)].view(tensor.dtype).view(tensor.shape)
                with self._storage.accessible([tensor]), self._storage.accessible([copies[name]], writes=True):
                    copies[name].copy_(tensor.detach())
                start += _padded(tensor)
            self._taken.put((copies, shards))
        except Exception as error:
            self._memory = None
            self._taken.put(error)

    def write(self, folder: Path, file: str, *, beside: bool = False) -> Written | None:
        """Write the oldest copy to a shard; if none has been taken yet, wait for it.

        Args:
            folder: Folder of the checkpoint.
            file: Name of the shard.
            beside: Whether steps run meanwhile: then use only idle cores, unless that gets too slow.

        Returns:
            The shard file and the logical tensors, each with its slice in the file; None if the copy is empty.

        Raises:
            CheckpointError: The state could not be copied or written.
        """
        taken = self._taken.get()
        if isinstance(taken, Exception):
            raise CheckpointError([f"its state can't be copied ({type(taken).__name__}: {taken})"]) from taken
        tensors, shards = taken
        if not tensors:
            return None
        saved = logical_tensors(file, tensors, shards)
        spare = sum(map(nbytes, tensors.values())) / _SLOWEST if beside else 0.0
        try:
            return write_shard(folder, file, tensors, spare, self._storage.accessible), saved
        except OffloadError as error:
            raise CheckpointError([str(error)]) from error

    def _allocated_off_device(self, size: int) -> Tensor:
        return self._storage.empty(size, torch.uint8)


def reader(
    source: ShardSource,
    tensors: Mapping[str, Logical],
    stored_names: Mapping[str, str],
    own: Callable[[str, str, Shape], Part],
) -> Read:
    """Return a function that reads an actor's parts of tensors from a checkpoint or a snapshot.

    Args:
        source: Where the shards are read from.
        tensors: Logical tensors by name.
        stored_names: For each copy of a tied weight, the name under which the checkpoint stores the weight.
        own: Returns the actor's part of a weight or of its optimizer state, by the actor's name of the weight, the key
            of the state and the shape of the logical tensor.
    """
    assembler = Assembler(source)

    def read(weight: str, kept: str = "") -> Tensor | None:
        whole = untiled(weight)
        logical = tensors.get(logical_name(stored_names.get(whole, whole), kept))
        return None if logical is None else assembler.read_part(logical, own(weight, kept, logical.shape))

    return read


def _touched(size: int) -> Tensor:
    """Allocate ``size`` bytes and write to them, so that the system really provides the pages."""
    return torch.empty(size, dtype=torch.uint8).fill_(0)


def _padded(tensor: Tensor) -> int:
    """Return the bytes of a tensor, rounded up to the alignment."""
    return -(-nbytes(tensor) // _ALIGNMENT) * _ALIGNMENT
