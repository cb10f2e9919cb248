"""What an actor puts into a checkpoint: a copy, taken between two steps and written beside the next ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType

import torch
from torch import Tensor

from raypar.actors.checkpoint.logical import Logical, Slice
from raypar.actors.checkpoint.shards import ShardFile, assemble, slice_of, write_shard
from raypar.actors.errors import CheckpointError
from raypar.actors.sharding import Cut
from raypar.actors.tensors import nbytes

_ALIGNMENT = 64  # bytes
_SLOWEST = (
    50e6  # bytes a second: beside steps that leave no core over, the rest of a shard is written as fast as can be
)
_NO_CUTS: Mapping[str, Cut] = MappingProxyType({})

Written = tuple[ShardFile, dict[str, Slice]]
Read = Callable[[str, str], Tensor | None]  # a weight's name, and what of it ("" is itself): None if it was not saved


def logical_name(weight: str, kept: str = "") -> str:
    """What a checkpoint calls a weight, or what the optimizer keeps for it: ``exp_avg``, say."""
    return f"optim.{weight}.{kept}" if kept else weight


def buffer_name(dp: int, buffer: str) -> str:
    """What a checkpoint calls a buffer of a layer, which is each replica's own."""
    return f"buffers.dp{dp}.{buffer}"


class Copies:
    """Copies of an actor's state on their way to disk: ``take`` one between two steps, ``write`` it in a thread.

    There is one at a time: their room is kept, since memory that is new to the process takes longer to fill.
    """

    def __init__(self) -> None:
        self._taken: SimpleQueue[tuple[dict[str, Tensor], Mapping[str, Cut]] | Exception] = SimpleQueue()
        self._maker = ThreadPoolExecutor(1)
        self._room: Future[Tensor] | None = None

    def make_room(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Get the memory for copies of such tensors ready, in a thread."""
        self._room = self._maker.submit(_touched, sum(_padded(tensor) for _, tensor in tensors))

    def take(self, tensors: Iterable[tuple[str, Tensor]], cuts: Mapping[str, Cut] = _NO_CUTS) -> None:
        """Copy tensors, with their logical names, to the host. What goes wrong is for ``write`` to say.

        ``cuts`` tells which of them are parts of logical tensors.
        """
        try:
            held = dict(tensors)
            if self._room is None or self._room.result().nbytes < sum(map(_padded, held.values())):
                self.make_room(held.items())
            assert self._room is not None
            room, start, copies = self._room.result(), 0, dict[str, Tensor]()
            for name, tensor in held.items():
                copies[name] = room[start : start + nbytes(tensor)].view(tensor.dtype).view(tensor.shape)
                copies[name].copy_(tensor.detach())
                start += _padded(tensor)
            self._taken.put((copies, cuts))
        except Exception as error:
            self._room = None
            self._taken.put(error)

    def write(self, folder: Path, file: str, *, beside: bool = False) -> Written | None:
        """Write the copy that was taken first, or is yet to be; None if there is nothing in it.

        ``beside`` steps it takes what cores they leave over, unless it gets too slow by that. Raises CheckpointError.
        """
        taken = self._taken.get()
        if isinstance(taken, Exception):
            raise CheckpointError([f"its state can't be copied ({type(taken).__name__}: {taken})"]) from taken
        tensors, cuts = taken
        if not tensors:
            return None
        wholes = {name: cuts.get(name) or Cut(tuple(tensor.shape)) for name, tensor in tensors.items()}
        slices = {name: slice_of(name, tensors[name], cut.whole, cut.offset) for name, cut in wholes.items()}
        spare = sum(map(nbytes, tensors.values())) / _SLOWEST if beside else 0.0
        return write_shard(folder, file, tensors, spare), slices


def reader(folder: Path, tensors: Mapping[str, Logical], homes: Mapping[str, str]) -> Read:
    """Reads from a checkpoint; a tied weight, whose copies are in ``homes``, under the name of its home."""

    def read(weight: str, kept: str = "") -> Tensor | None:
        logical = tensors.get(logical_name(homes.get(weight, weight), kept))
        return None if logical is None else assemble(folder, logical)

    return read


def _touched(size: int) -> Tensor:
    """So many bytes of memory that the system has handed over."""
    return torch.empty(size, dtype=torch.uint8).fill_(0)


def _padded(tensor: Tensor) -> int:
    """Bytes of a tensor, and of the gap behind it."""
    return -(-nbytes(tensor) // _ALIGNMENT) * _ALIGNMENT
