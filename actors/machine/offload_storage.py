"""Storage of tensors that an actor needs only temporarily: its device, host memory, or a file.

On CPUs the device's memory is the private memory of a process. Host memory is then memory that is mapped as shared:
like a file, it counts neither as data of the process (RLIMIT_DATA) nor, while it is not accessed, in its resident size.
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

# <asm-generic/mman-common.h>: they fault pages in, and return an error where an access would end the process (SIGBUS)
_POPULATE_READ, _POPULATE_WRITE = 22, 23
PORTION = 4 << 20  # bytes of tensors off the device that are used at a time, unless one alone is larger
_NOT_MAPPED = ctypes.c_void_p(-1).value  # MAP_FAILED
_WAIT_BEFORE = 1  # <linux/fs.h>: SYNC_FILE_RANGE_WAIT_BEFORE


class OffloadStorage(ABC):
    """Storage of an actor's masters, optimizer states, sums of gradients, and perhaps weights.

    Attributes:
        is_off_device: Whether it is off the device.
    """

    is_off_device = True

    @abstractmethod
    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialised tensor (count,) in the storage.

        Raises:
            OffloadError: There is no space.
        """

    @abstractmethod
    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the storage."""

    def reserve(self, sizes: Iterable[int]) -> None:  # noqa: B027
        """Reserve space for tensors of these bytes, besides what is used. Raises OffloadError if there is none."""

    @contextmanager
    def accessible(self, tensors: Iterable[Tensor], *, writes: bool = False) -> Iterator[None]:
        """Return a context in which tensors can be read, or also written to.

        Args:
            tensors: The tensors; those that are not in the storage are ignored.
            writes: Whether they are written to.

        Raises:
            OffloadError: They can't be read from the disk.
        """
        yield

    def prefetch(self, tensor: Tensor) -> None:  # noqa: B027
        """Start to read a tensor from the disk, before it is used."""

    def check(self) -> None:  # noqa: B027
        """Raise OffloadError if a write to the disk has failed since the last check."""

    def moved(self, tensor: Tensor, into: Tensor | None = None) -> Tensor:
        """Copy a tensor into the storage, with the same shape and strides. Return it if it is there already.

        Args:
            tensor: The tensor.
            into: A tensor of the storage with the same shape, to copy the values into; None allocates one.
        """
        if self.holds(tensor):
            return tensor
        if into is None:
            into = self.like(tensor, tensor.dtype)
        with torch.no_grad(), self.accessible([into], writes=True):
            return into.copy_(tensor)

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor: in the storage if the tensor is, else on the tensor's device."""
        if not (self.is_off_device and self.holds(tensor)):
            return tensor.detach().clone()
        copy = self.like(tensor, tensor.dtype)
        with torch.no_grad(), self.accessible([tensor]), self.accessible([copy], writes=True):
            return copy.copy_(tensor)

    def like(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Allocate a tensor in the storage, with the shape and memory order of another one.

        Args:
            tensor: The other tensor.
            dtype: The dtype.
        """
        strides = torch.empty_like(tensor, device="meta").stride()  # dense even where the tensor is not
        return self.empty(tensor.numel(), dtype).as_strided(tensor.shape, strides)


class DeviceStorage(OffloadStorage):
    """The memory of the device itself: nothing is offloaded."""

    is_off_device = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self._device)

    def holds(self, tensor: Tensor) -> bool:
        return True


class PinnedStorage(OffloadStorage):
    """Host memory of an actor that computes on a GPU, which reads and writes it directly."""

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"


class MappedStorage(OffloadStorage):
    """Memory that is mapped as shared: of an unnamed file, or host memory without a file.

    The file takes no space after its actor's end, even after a crash. Memory that is not accessed is not in the
    resident size of the process: it is in host memory, in the page cache, or on the disk.

    Args:
        folder: Folder of the file; None for host memory.
        actor: Name of the actor, for messages.

    Raises:
        OffloadError: A file can't be created in the folder.
    """

    def __init__(self, folder: str | None, actor: str) -> None:
        self._used = self._reserved = 0  # bytes of the file
        self._left = defaultdict[int, list[int]](list)  # by size, offsets of free memory in the file
        self._lock = threading.Lock()  # copies for checkpoints are allocated in another thread
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
        """Map pages of the file, or of host memory. Raises OffloadError if the disk has no space."""
        if not count:
            return torch.empty(0, dtype=dtype)
        size = _pages(count * dtype.itemsize)
        offset = None if self._file is None else self._free_offset(size)
        mapping = self._mapped(size, offset)
        tensor = torch.frombuffer(mapping, dtype=dtype, count=count)
        address = tensor.data_ptr()
        self._addresses.add(address)
        weakref.finalize(mapping, self._addresses.discard, address)  # the address may be reused
        if offset is not None:
            weakref.finalize(mapping, self._left[size].append, offset)
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._addresses

    def reserve(self, sizes: Iterable[int]) -> None:
        pages = [] if self._file is None else [_pages(size) for size in sizes if size]
        with self._lock:
            self._grow(self._used + sum(pages))
            for size in pages:
                self._left[size].append(self._used)
                self._used += size

    @contextmanager
    def accessible(self, tensors: Iterable[Tensor], *, writes: bool = False) -> Iterator[None]:
        """Return a context in which all pages of tensors are mapped; afterwards none are."""
        held = [tensor for tensor in tensors if self.holds(tensor)]
        for tensor in held:
            failed = self._advise(tensor, _POPULATE_WRITE if writes else _POPULATE_READ)
            if failed not in (0, errno.EINVAL):  # Linux before 5.14 does not have it
                raise self._failed("written" if writes else "read", failed)
        try:
            yield
        finally:
            for tensor in held:
                self._advise(tensor, mmap.MADV_DONTNEED)

    def prefetch(self, tensor: Tensor) -> None:
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

        Python's mmap would open the file again for each mapping.
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

    def _free_offset(self, size: int) -> int:
        """Return the offset of free bytes in the file."""
        with self._lock:
            if self._left[size]:
                return self._left[size].pop()
            self._grow(self._used + size)
            self._used += size
            return self._used - size

    def _grow(self, size: int) -> None:
        """Extend the file to at least these bytes, with space on the disk for them."""
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
        """Call madvise for the pages of a tensor, and return the errno, 0 for none."""
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
    """Return the storage of an actor: its device, host memory, or a file.

    Args:
        device: The device.
        folder: The folder of files; None for host memory.
        actor: Name of the actor, for messages.
        apart: Whether the run offloads anything.

    Raises:
        OffloadError: A file can't be created in the folder.
    """
    if not apart:
        return DeviceStorage(device)
    if folder is None and device.type == "cuda":
        return PinnedStorage()
    return MappedStorage(folder, actor)


def _pages(size: int) -> int:
    """Round bytes up to whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
