"""Flat tensors whose memory is returned to the system as soon as they are not used.

The C library's heap would not return it: a freed block is rarely reused for one of the same size, since an aligned
block needs some bytes more, which smaller blocks have taken since.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor

from raypar.actors.machine.system_features import has_feature

_NONE, _READ_WRITE = 0, 3  # <sys/mman.h>: PROT_NONE, PROT_READ | PROT_WRITE


class FlatMemory:
    """A flat tensor whose memory can be released and allocated again, while its views, also autograd's, stay valid.

    On CPUs with Linux it is a separate mapping. Reading it while it is released crashes the process (SIGSEGV), which is
    better than garbage.

    Args:
        count: Number of elements.
        dtype: Dtype of the elements.
        device: The device.

    Attributes:
        tensor: The tensor (count,). Its memory is allocated at first: some devices have no views of released tensors.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._mapping: mmap.mmap | None = None
        self._size = count * dtype.itemsize
        if device.type == "cpu" and self._size and has_feature("released_pages"):
            self._mapping, self.tensor = _mapped(count, dtype)
            self._address = ctypes.c_void_p(self.tensor.data_ptr())
        else:
            self.tensor = torch.empty(count, dtype=dtype, device=device)

    def take(self) -> None:
        """Allocate memory for the tensor, with undefined values."""
        if self._mapping is not None:
            self._protect(_READ_WRITE)
        else:
            self.tensor.untyped_storage().resize_(self._size)

    def release(self) -> None:
        """Release the memory. Its values are lost."""
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
            self._protect(_NONE)
        else:
            self.tensor.untyped_storage().resize_(0)

    def _protect(self, protection: int) -> None:
        assert self._mapping is not None
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(self._address, ctypes.c_size_t(len(self._mapping)), protection):
            raise MemoryError(f"{self._size} bytes can't be had (error {ctypes.get_errno()})")


def flat_empty(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor (count,) whose memory is returned as soon as the tensor is deleted."""
    if device.type == "cpu" and count and has_feature("released_pages"):
        return _mapped(count, dtype)[1]
    return torch.empty(count, dtype=dtype, device=device)


def _mapped(count: int, dtype: torch.dtype) -> tuple[mmap.mmap, Tensor]:
    size = -(-count * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a hint, for fewer page faults; some kernels are built without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping, torch.frombuffer(mapping, dtype=dtype, count=count)
