"""Features of the operating system that not every system has. Linux has all of them, macOS none.

This is the only table of them. Code checks a feature by its name, and has the fallback that is given here; a run that
needs a missing feature is refused before its launch (``recovery_faults``).
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

Feature = Literal[
    "core_affinity",
    "idle_threads",
    "batch_threads",
    "memory_files",
    "process_handles",
    "process_list",
    "shared_memory_folder",
    "released_pages",
    "closing_connections",
]


@dataclass(frozen=True)
class Requirement:
    """The requirements of a feature on the system.

    Attributes:
        names: Modules of the standard library, and a name that each must have.
        files: Files that must exist.
        only_on: The only system (``sys.platform``) that has the feature, if names do not show it; "" for any.
    """

    names: tuple[tuple[ModuleType, str], ...] = ()
    files: tuple[str, ...] = ()
    only_on: str = ""

    def missing(self) -> list[str]:
        """Return the missing names and files, such as "os.memfd_create", "/proc/self/fd"."""
        names = [f"{module.__name__}.{name}" for module, name in self.names if not hasattr(module, name)]
        if self.only_on and sys.platform != self.only_on:
            names.append(self.only_on)
        return names + [file for file in self.files if not Path(file).exists()]


REQUIREMENTS: Mapping[Feature, Requirement] = {
    # The cores that a process may use. Without: all cores of the machine.
    "core_affinity": Requirement(((os, "sched_getaffinity"),)),
    # A thread with idle priority. Without: saves in the background have normal priority.
    "idle_threads": Requirement(((os, "sched_setscheduler"), (os, "SCHED_IDLE"))),
    # A thread that does not preempt others. Without: Gloo's threads may preempt the computing one.
    "batch_threads": Requirement(((os, "sched_setscheduler"), (os, "SCHED_BATCH")), ("/proc/self/task",)),
    # Files in memory that other processes open. Without: no recovery, and no last action of an actor that has died.
    "memory_files": Requirement(((os, "memfd_create"), (os, "posix_fallocate")), ("/proc/self/fd",)),
    # A process that is signalled by a descriptor, and never another one with its pid. Without: no recovery.
    "process_handles": Requirement(((os, "pidfd_open"), (signal, "pidfd_send_signal"))),
    # Processes and their start times. Without: doctor does not search for remains of earlier Rays.
    "process_list": Requirement(files=("/proc/self/stat",)),
    # Files in memory, in a folder. Without: the object store of a Ray that raypar starts is in files below TMPDIR.
    "shared_memory_folder": Requirement(files=("/dev/shm",)),
    # Pages that madvise returns at once. Without: the allocator decides when memory is returned to the system.
    "released_pages": Requirement(((mmap, "MADV_DONTNEED"), (mmap, "MADV_HUGEPAGE")), only_on="linux"),
    # Gloo's transport "tcp", where a late wait closes the group's connections at both ends. Elsewhere it is "uv", where
    # it closes none. Without: waits check for an abort, and the driver reports it to peers.
    "closing_connections": Requirement(only_on="linux"),
}


def has_feature(feature: Feature) -> bool:
    """Return whether this system has a feature."""
    return not REQUIREMENTS[feature].missing()
