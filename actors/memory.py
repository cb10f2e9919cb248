"""The memory of this process, as the system counts it."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's <malloc.h>
_HUGE = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, for this process' whole life (glibc; elsewhere nothing happens).

    A step frees and takes the same activations again and again; giving them back to the system in between costs a page
    fault for each of their pages. One arena, because the thread that computes is not the main one.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, _HUGE)):
            mallopt(option, value)


class PeakMemory:
    """The high-water mark of this process' resident memory (Linux; elsewhere it is 0).

    The two files stay open: a step asks at its start and at its end, and opening them costs more than reading.
    """

    def __init__(self) -> None:
        try:
            files = os.open("/proc/self/clear_refs", os.O_WRONLY), os.open("/proc/self/status", os.O_RDONLY)
        except OSError:
            self._clear: int | None = None
        else:
            self._clear, self._status = files
            weakref.finalize(self, _close, files)

    def reset(self) -> None:
        """Start a new mark."""
        if self._clear is not None:
            os.pwrite(self._clear, b"5", 0)

    def read(self) -> int:
        """Most bytes since the last reset."""
        if self._clear is None:
            return 0
        _, _, rest = os.pread(self._status, 4096, 0).partition(b"VmHWM:")
        return int(rest.split(None, 1)[0]) * 1024 if rest else 0


def _close(files: tuple[int, ...]) -> None:
    for file in files:
        os.close(file)
