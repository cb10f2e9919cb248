"""The memory of this process, as the system counts it."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")

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


def reset_peak() -> None:
    """Start a new high-water mark (Linux; elsewhere the mark is the process' whole life)."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return


def peak() -> int:
    """Most bytes of resident memory since ``reset_peak``; 0 where the system does not tell."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
