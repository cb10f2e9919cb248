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
    """One piece of shared memory: ``data`` (SLAB bytes, uint8), written by its owner and read by those it is lent to.

    Each count in the header is written by one reader alone, and what is lent is known to the owner alone: no write is
    ever raced for.
    """

    def __init__(self, fd: int, number: int) -> None:
        memory = mmap.mmap(fd, _HEADER + SLAB)
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
    """The slabs of one member of a group of ``size``."""

    def __init__(self, size: int) -> None:
        if size * 8 > _HEADER:
            raise ValueError(f"{size} members: shared memory has room for {_HEADER // 8}")
        self._slabs: deque[Slab] = deque()  # the one used longest ago first: its readers are the likeliest to be done
        self._fds: list[int] = []
        self._end = SLAB  # how much of the last one is taken

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def put(self, data: Tensor) -> tuple[Slab, int]:
        """Write at most SLAB bytes (uint8); where they stand. Lend the slab before the next put."""
        count = data.numel()
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
        if self._slabs and self._slabs[0].free:
            self._slabs.rotate(-1)
        else:
            fd = os.memfd_create("raypar", os.MFD_CLOEXEC)
            os.ftruncate(fd, _HEADER + SLAB)
            self._slabs.append(Slab(fd, len(self._fds)))
            self._fds.append(fd)
        self._end = 0
