"""Where an actor keeps what it needs only at times: on its device, in host memory, or in a file.

On CPUs the device's memory is what a process holds by itself. Host memory is then memory that is mapped as shared: as
that of a file, it counts neither as data of the process (RLIMIT_DATA) nor, while it is not at hand, in its size.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from raypar.actors.errors import OffloadError
from raypar.actors.tensors import nbytes

# <asm-generic/mman-common.h>: they fault pages in, and tell an error where an access would end the process (SIGBUS)
_POPULATE_READ, _POPULATE_WRITE = 22, 23
_NOT_MAPPED = ctypes.c_void_p(-1).value  # MAP_FAILED
_WAIT_BEFORE = 1  # <linux/fs.h>: SYNC_FILE_RANGE_WAIT_BEFORE


class OffloadStorage(ABC):
    """Where an actor keeps its masters, optimizer states, sums of gradients, and perhaps weights.

    Attributes:
        is_apart: Whether that is another place than the device's memory.
    """

    is_apart = True

    @abstractmethod
    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate a tensor (count,) here, uninitialised.

        Raises:
            OffloadError: There is no room.
        """

    @abstractmethod
    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is here."""

    def reserve(self, sizes: Iterable[int]) -> None:  # noqa: B027
        """Make sure that there will be room for tensors of these bytes. Raises OffloadError if there is none."""

    @contextmanager
    def at_hand(self, tensors: Iterable[Tensor], *, writes: bool = False) -> Iterator[None]:
        """Within the context, tensors are to be read, or also written to.

        Args:
            tensors: The tensors; those that are not here do not matter.
            writes: Whether they are written to.

        Raises:
            OffloadError: They can't be read from the disk.
        """
        yield

    def expect(self, tensor: Tensor) -> None:  # noqa: B027
        """Start to read a tensor from the disk, because it will soon be used."""

    def check(self) -> None:  # noqa: B027
        """Raise OffloadError if something could not be written to the disk since the last check."""

    def moved(self, tensor: Tensor, into: Tensor | None = None) -> Tensor:
        """Copy a tensor into memory of this home, with the same shape and strides. If it is here already, return it.

        Args:
            tensor: The tensor.
            into: A tensor of this home with the same shape, which takes the values; None allocates one.
        """
        if self.holds(tensor):
            return tensor
        if into is None:
            into = self.like(tensor, tensor.dtype)
        with torch.no_grad(), self.at_hand([into], writes=True):
            return into.copy_(tensor)

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor: here if the tensor is, too, else on its device."""
        if not (self.is_apart and self.holds(tensor)):
            return tensor.detach().clone()
        copy = self.like(tensor, tensor.dtype)
        with torch.no_grad(), self.at_hand([tensor]), self.at_hand([copy], writes=True):
            return copy.copy_(tensor)

    def like(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Allocate a tensor here of the shape and order in memory of another one.

        Args:
            tensor: The other tensor.
            dtype: The dtype.
        """
        strides = torch.empty_like(tensor, device="meta").stride()  # dense even where the tensor is not
        return self.empty(tensor.numel(), dtype).as_strided(tensor.shape, strides)


class DeviceHome(OffloadStorage):
    """The memory of the device itself: nothing is offloaded."""

    is_apart = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self._device)

    def holds(self, tensor: Tensor) -> bool:
        return True


class PinnedHome(OffloadStorage):
    """Host memory of an actor that computes on a GPU, which reads and writes it directly."""

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"


class MappedHome(OffloadStorage):
    """Memory that is mapped as shared: of a file without a name, or of none, that is, host memory.

    The file takes no room after its actor's end, however that comes. What is not at hand is not in the size of the
    process: host memory keeps it, or the system's cache of files, or the disk.

    Args:
        folder: Folder of the file; None for host memory.
        actor: Name of the actor, for messages.

    Raises:
        OffloadError: There can be no file in the folder.
    """

    def __init__(self, folder: str | None, actor: str) -> None:
        self._used = self._reserved = 0  # bytes of the file
        self._left = defaultdict[int, list[int]](list)  # by size, where memory of the file is free again
        self._lock = threading.Lock()  # copies for checkpoints get their memory in another thread
        self._addresses = set[int]()
        self._file = None
        self._name = "host memory" if folder is None else f"the offload file of {actor} in {folder!r}"
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._map = self._libc.mmap
        self._map.restype = ctypes.c_void_p
        if folder is not None:
            try:
                self._file = tempfile.TemporaryFile(prefix=".raypar-", dir=Path(folder), buffering=0)  # noqa: SIM115
            except OSError as error:
                raise self._failed("made", error.errno or 0) from error

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Map pages of the file, or of host memory. Raises OffloadError if the disk has no room."""
        if not count:
            return torch.empty(0, dtype=dtype)
        size = _pages(count * dtype.itemsize)
        offset = None if self._file is None else self._room(size)
        mapping = self._mapped(size, offset)
        tensor = torch.frombuffer(mapping, dtype=dtype, count=count)
        address = tensor.data_ptr()
        self._addresses.add(address)
        weakref.finalize(mapping, self._addresses.discard, address)  # other memory may come to be there
        if offset is not None:
            weakref.finalize(mapping, self._left[size].append, offset)
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._addresses

    def reserve(self, sizes: Iterable[int]) -> None:
        self._grow(self._used + sum(map(_pages, sizes)))

    @contextmanager
    def at_hand(self, tensors: Iterable[Tensor], *, writes: bool = False) -> Iterator[None]:
        """Map all pages of tensors now, and none afterwards."""
        here = [tensor for tensor in tensors if self.holds(tensor)]
        for tensor in here:
            failed = self._advise(tensor, _POPULATE_WRITE if writes else _POPULATE_READ)
            if failed not in (0, errno.EINVAL):  # Linux before 5.14 does not know it
                raise self._failed("written" if writes else "read", failed)
        try:
            yield
        finally:
            for tensor in here:
                self._advise(tensor, mmap.MADV_DONTNEED)

    def expect(self, tensor: Tensor) -> None:
        if self._file is not None:
            self._advise(tensor, mmap.MADV_WILLNEED)

    def check(self) -> None:
        if self._file is not None and (waited := getattr(self._libc, "sync_file_range", None)) is not None:
            whole = ctypes.c_int64(0)
            if waited(self._file.fileno(), whole, whole, ctypes.c_uint(_WAIT_BEFORE)):
                failed = ctypes.get_errno()
                if failed not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
                    raise self._failed("written", failed)

    def _mapped(self, size: int, offset: int | None) -> ctypes.Array[ctypes.c_char]:
        """Map pages of the file, or of host memory, until the array and all views of it are gone.

        Python's own mmap would open the file once more for each mapping.
        """
        kind = mmap.MAP_SHARED | (mmap.MAP_ANONYMOUS if self._file is None else 0)
        file, start = -1 if self._file is None else self._file.fileno(), ctypes.c_long(offset or 0)
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        address = self._map(None, ctypes.c_size_t(size), rights, kind, file, start)
        if address in (None, _NOT_MAPPED):
            raise self._failed(f"mapped for {size / 2**20:.1f} MiB more", ctypes.get_errno())
        memory = (ctypes.c_char * size).from_address(address)
        ends = weakref.finalize(memory, self._libc.munmap, ctypes.c_void_p(address), ctypes.c_size_t(size))
        ends.atexit = False  # tensors may outlive it
        return memory

    def _room(self, size: int) -> int:
        """Return where in the file a size is free."""
        with self._lock:
            if self._left[size]:
                return self._left[size].pop()
            self._grow(self._used + size)
            self._used += size
            return self._used - size

    def _grow(self, size: int) -> None:
        """Make sure that the file has at least these bytes, and the disk room for them."""
        if self._file is None or size <= self._reserved:
            return
        fallocate = getattr(os, "posix_fallocate", None)  # macOS has none
        try:
            if fallocate is None:
                os.ftruncate(self._file.fileno(), size)
            else:
                fallocate(self._file.fileno(), self._reserved, size - self._reserved)
        except OSError as error:
            raise self._failed(f"made {size / 2**20:.1f} MiB large", error.errno or 0) from error
        self._reserved = size

    def _advise(self, tensor: Tensor, advice: int) -> int:
        """Call madvise for the pages of a tensor, and return the number of the error, 0 for none."""
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = tensor.data_ptr() + nbytes(tensor) - start
        if self._libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(advice)):
            return ctypes.get_errno()
        return 0

    def _failed(self, doing: str, number: int) -> OffloadError:
        reason = os.strerror(errno.EIO if number == errno.EFAULT else number)  # madvise's word for a page that is lost
        return OffloadError(f"{self._name} can't be {doing} ({reason}): {_FIXES.get(number, _OTHER_FIX)}")


_OTHER_FIX = "look at the disk, or give another offload_folder"
_FULL = "free some space, or give another offload_folder"
_FIXES = {errno.ENOSPC: _FULL, errno.EDQUOT: _FULL, errno.EFBIG: "raise the limit of file sizes (ulimit -f)"}


def storage_of(device: torch.device, folder: str | None, actor: str, *, apart: bool) -> OffloadStorage:
    """Return the home of an actor: its device, host memory, or a file.

    Args:
        device: The device.
        folder: The folder of files; None for host memory.
        actor: Name of the actor, for messages.
        apart: Whether the run offloads anything.

    Raises:
        OffloadError: There can be no file in the folder.
    """
    if not apart:
        return DeviceHome(device)
    if folder is None and device.type == "cuda":
        return PinnedHome()
    return MappedHome(folder, actor)


def _pages(size: int) -> int:
    """Round bytes up to whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
