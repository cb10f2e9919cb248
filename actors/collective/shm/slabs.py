"""Shared memory that one process writes and others on its node read: anonymous files, passed on as descriptors.

The files have no name, in /dev/shm or elsewhere, so nothing is left behind however a process ends.
"""

from __future__ import annotations

import mmap
import os
from collections import deque

import torch
from torch import Tensor

SLAB = 1 << 20  # bytes of data; untouched pages take no memory
_HEADER = 4096  # bytes: a uint64 per reader that counts the loans it has returned
_LINE = 64  # bytes: parts are aligned to cache lines


class Slab:
    """A block of shared memory that its owner writes and that the ranks it is lent to read.

    There are no write races: each counter in the header is written by one reader, and only the owner counts the loans.

    Args:
        fd: Descriptor of the memory, which may be closed afterwards.
        number: Number of the slab among its owner's.

    Attributes:
        data: The memory behind the header (uint8).
    """

    def __init__(self, fd: int, number: int) -> None:
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self.number = number
        self.data: Tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER)
        self._returned = memoryview(memory)[:_HEADER].cast("Q")
        self._lent: dict[int, int] = {}

    def lend(self, reader: int) -> None:
        """Count a loan to rank ``reader``, before it reads from the slab. For the owner only."""
        self._lent[reader] = self._lent.get(reader, 0) + 1

    def give_back(self, reader: int) -> None:
        """Count one loan of rank ``reader`` as returned, after it has read. For readers only."""
        self._returned[reader] += 1

    @property
    def free(self) -> bool:
        """Whether all loans have been returned, so that the owner may overwrite the data."""
        return all(self._returned[reader] == count for reader, count in self._lent.items())


class Pool:
    """The slabs that one member of a group owns: those that it copies segments into, and windows.

    A window is a slab that holds a tensor of the member, whose segments are lent in place, without a copy. It lives as
    long as the group.

    Args:
        size: Number of members.

    Raises:
        ValueError: There are more members than a slab has counters.
    """

    def __init__(self, size: int) -> None:
        if size * 8 > _HEADER:
            raise ValueError(f"{size} members: shared memory has room for {_HEADER // 8}")
        self._slabs: deque[Slab] = deque()  # least recently used first: its readers are most likely to be done
        self._windows: dict[int, Slab] = {}  # by address of their data
        self._fds: list[int] = []
        self._end = SLAB  # used bytes of the last slab

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def window(self, count: int) -> Tensor:
        """Allocate a tensor (count,) of uint8 in shared memory."""
        slab = self._new(max(1, count))
        self._windows[slab.data.data_ptr()] = slab
        return slab.data[:count]

    def window_of(self, tensor: Tensor) -> Slab | None:
        """Return the window that holds a tensor; None if it is not in one."""
        return self._windows.get(tensor.untyped_storage().data_ptr())

    def put(self, data: Tensor) -> tuple[Slab, int]:
        """Copy ``data``, at most SLAB bytes (uint8), into a slab. Lend the slab before the next put.

        Returns the slab and the offset in it, in bytes.
        """
        count = data.numel()
        if self._slabs and self._slabs[-1].free:
            self._end = 0  # reuse it from its start: what was just read is in cache
        if self._end + count > SLAB:
            self._next()
        slab, start = self._slabs[-1], self._end
        slab.data[start : start + count].copy_(data)
        self._end += -(-count // _LINE) * _LINE
        return slab, start

    def fd(self, slab: Slab) -> int:
        """Return the file descriptor with which a peer maps the slab."""
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
