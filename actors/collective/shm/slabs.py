"""Shared memory that one process writes and others on its node read: anonymous files, passed on as descriptors.

The files have no name, in /dev/shm or elsewhere, so none remains however a process ends.

Memory ordering, on any CPU: a reader sees what the owner has written because the message about it goes through a socket
of the kernel, whose locks order both sides. What a reader still reads does not change because it posts a semaphore when
it has read, and the owner takes that before it writes again: ``sem_post`` and ``sem_trywait`` synchronize memory
(POSIX.1-2017, 4.12). A plain counter would do on x86; on aarch64 its store may be seen before the loads are done.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque

import torch
from torch import Tensor

from raypar.actors.machine.memory_files import reserve

SLAB = 1 << 20  # bytes of data; untouched pages take no memory
_SEMAPHORE = 64  # bytes for each: a cache line, of which glibc and musl use 32
_PAGE = 4096  # bytes
_RESERVED = 1 << 17  # bytes of a slab that get memory at a time
_LINE = 64  # bytes: parts are aligned to cache lines

# None of these functions waits, so they keep the GIL, which takes less time.
_LIBC = ctypes.PyDLL(None)
_of_semaphore = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_post, _take = _of_semaphore(("sem_post", _LIBC)), _of_semaphore(("sem_trywait", _LIBC))


class Slab:
    """A block of shared memory that its owner writes and that other ranks read.

    Its header has a semaphore for each rank, which counts the reads that the rank has finished and that the owner has
    not noted yet.

    Args:
        fd: Descriptor of the memory, which may be closed afterwards.
        number: Number of the slab among its owner's.
        members: Number of members of the group.

    Attributes:
        data: The memory after the header (uint8).
    """

    def __init__(self, fd: int, number: int, members: int) -> None:
        self.number = number
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self.data: Tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=header(members))
        self._semaphores = self.data.data_ptr() - header(members)
        self._reads: dict[int, int] = {}  # by reader, the reads that are not known to be finished

    def make_semaphores(self, members: int) -> None:
        """Begin to count. For the owner only, before anybody else has the slab."""
        for reader in range(members):
            if _LIBC.sem_init(ctypes.c_void_p(self._semaphore(reader)), 1, 0):
                raise OSError("this system has no semaphores that processes share")

    def share(self, reader: int) -> None:
        """Count a read by rank ``reader``, before it begins. For the owner only."""
        self._reads[reader] = self._reads.get(reader, 0) + 1

    def give_back(self, reader: int) -> None:
        """Count one read by rank ``reader`` as finished. For readers only."""
        _post(self._semaphore(reader))

    @property
    def free(self) -> bool:
        """Whether all reads are finished, so that the owner may overwrite the data. For the owner only."""
        for reader in tuple(self._reads):
            semaphore = self._semaphore(reader)
            while self._reads[reader] and not _take(semaphore):
                self._reads[reader] -= 1
            if self._reads[reader]:
                return False
            del self._reads[reader]
        return True

    def _semaphore(self, reader: int) -> int:
        """Return the address of a reader's semaphore."""
        return self._semaphores + reader * _SEMAPHORE


class Pool:
    """The slabs that one member of a group owns: those that it copies segments into, and windows.

    A window is a slab with a tensor of the member, whose segments peers read in place, without a copy. It lives as long
    as the group.

    Args:
        size: Number of members.
    """

    def __init__(self, size: int) -> None:
        self._members = size
        self._slabs: deque[Slab] = deque()  # least recently used first: its readers are most likely to be done
        self._windows: dict[int, Slab] = {}  # by address of their data
        self._fds: list[int] = []
        self._reserved: dict[int, int] = {}  # by number of a slab, the bytes of its data that have memory
        self._end = SLAB  # used bytes of the last slab

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def window(self, count: int) -> Tensor:
        """Allocate a tensor (count,) of uint8 in shared memory. Raises OSError if there is no memory left."""
        slab = self._new(max(1, count))
        self._reserve(slab, count)
        self._windows[slab.data.data_ptr()] = slab
        return slab.data[:count]

    def window_of(self, tensor: Tensor) -> Slab | None:
        """Return the window that holds a tensor; None if it is not in one."""
        return self._windows.get(tensor.untyped_storage().data_ptr())

    def put(self, data: Tensor) -> tuple[Slab, int]:
        """Copy ``data``, at most SLAB bytes (uint8), into a slab. Call ``share`` before the next put.

        Returns the slab and the offset in it, in bytes. Raises OSError if there is no memory left.
        """
        count = data.numel()
        if self._slabs and self._slabs[-1].free:
            self._end = 0  # reuse it from its start: what was just read is in cache
        if self._end + count > SLAB:
            self._next()
        slab, start = self._slabs[-1], self._end
        if start + count > self._reserved[slab.number]:
            self._reserve(slab, min(SLAB, -(-(start + count) // _RESERVED) * _RESERVED))
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
        """Make a slab of ``count`` bytes of data, which have no memory yet."""
        fd = os.memfd_create("raypar", os.MFD_CLOEXEC)
        self._fds.append(fd)
        os.ftruncate(fd, header(self._members) + count)
        reserve(fd, 0, header(self._members))
        slab = Slab(fd, len(self._fds) - 1, self._members)
        slab.make_semaphores(self._members)
        self._reserved[slab.number] = 0
        return slab

    def _reserve(self, slab: Slab, end: int) -> None:
        """Give the first ``end`` bytes of a slab's data memory."""
        before = self._reserved[slab.number]
        reserve(self._fds[slab.number], header(self._members) + before, end - before)
        self._reserved[slab.number] = end


def header(members: int) -> int:
    """Return the bytes before the data of a slab: a semaphore for each member."""
    return -(-members * _SEMAPHORE // _PAGE) * _PAGE
