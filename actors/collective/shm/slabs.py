"""Memory that one process writes and others of its node read: anonymous files, passed on as descriptors.

Nothing of it has a name, in /dev/shm or elsewhere, so nothing is left behind however a process ends.
"""

from __future__ import annotations

import mmap
import os
from collections import deque

import torch
from torch import Tensor

SLAB = 1 << 20  # bytes of data; pages that nobody has touched take no memory
_HEADER = 4096  # 8 bytes for each reader: how many loans it has given back
_LINE = 64  # parts start at cache lines


class Slab:
    """One piece of shared memory: ``data`` (uint8), written by its owner and read by those it is lent to.

    Each count in the header is written by one reader alone, and what is lent is known to the owner alone: no write is
    ever raced for.
    """

    def __init__(self, fd: int, number: int) -> None:
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self.number = number
        self.data: Tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER)
        self._returned = memoryview(memory)[:_HEADER].cast("Q")
        self._lent: dict[int, int] = {}

    def lend(self, reader: int) -> None:
        """The owner: ``reader`` will read something here."""
        self._lent[reader] = self._lent.get(reader, 0) + 1

    def give_back(self, reader: int) -> None:
        """A reader: it has read what one loan was for."""
        self._returned[reader] += 1

    @property
    def free(self) -> bool:
        """Whether the owner may write it again."""
        return all(self._returned[reader] == count for reader, count in self._lent.items())


class Pool:
    """The slabs of one member of a group of ``size``: those that pieces are copied into, and windows.

    A window is a slab that a tensor of the member lives in: its pieces are lent as they stand. It stays until the group
    is dropped.
    """

    def __init__(self, size: int) -> None:
        if size * 8 > _HEADER:
            raise ValueError(f"{size} members: shared memory has room for {_HEADER // 8}")
        self._slabs: deque[Slab] = deque()  # the one used longest ago first: its readers are the likeliest to be done
        self._windows: dict[int, Slab] = {}  # by the address of their data
        self._fds: list[int] = []
        self._end = SLAB  # how much of the last one is taken

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def window(self, count: int) -> Tensor:
        """A new tensor (uint8) of ``count`` bytes that stays in shared memory."""
        slab = self._new(max(1, count))
        self._windows[slab.data.data_ptr()] = slab
        return slab.data[:count]

    def window_of(self, tensor: Tensor) -> Slab | None:
        """The window that a tensor is in."""
        return self._windows.get(tensor.untyped_storage().data_ptr())

    def put(self, data: Tensor) -> tuple[Slab, int]:
        """Copy at most SLAB bytes (uint8); where they stand. Lend the slab before the next put."""
        count = data.numel()
        if self._slabs and self._slabs[-1].free:
            self._end = 0  # what was just read is in cache
        if self._end + count > SLAB:
            self._next()
        slab, start = self._slabs[-1], self._end
        slab.data[start : start + count].copy_(data)
        self._end += -(-count // _LINE) * _LINE
        return slab, start

    def fd(self, slab: Slab) -> int:
        """What a peer maps the slab by."""
        return self._fds[slab.number]

    def _next(self) -> None:
        free = next((slab for slab in self._slabs if slab.free), None)
        if free is None:
            free = self._new(SLAB)
        else:
            self._slabs.remove(free)
        self._slabs.append(free)
        self._end = 0

    def _new(self, count: int) -> Slab:
        fd = os.memfd_create("raypar", os.MFD_CLOEXEC)
        os.ftruncate(fd, _HEADER + count)
        self._fds.append(fd)
        return Slab(fd, len(self._fds) - 1)
