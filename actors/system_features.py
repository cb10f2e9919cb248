"""What this package uses of the operating system that not every system has. Linux has all of it, macOS none.

This table is the one place that knows. Code asks it by the name of a feature, and does without, as is said there; a run
that can't do without is refused before its launch (``recovery_faults``).
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
    """What a feature needs of the system.

    Attributes:
        names: Modules of the standard library, and what each must have.
        files: Files that must be there.
        only_on: Where the names say nothing: the one system (``sys.platform``) that has the feature; "" for any.
    """

    names: tuple[tuple[ModuleType, str], ...] = ()
    files: tuple[str, ...] = ()
    only_on: str = ""

    def missing(self) -> list[str]:
        """Return what is not here, as a user knows it: "os.memfd_create", "/proc/self/fd"."""
        names = [f"{module.__name__}.{name}" for module, name in self.names if not hasattr(module, name)]
        if self.only_on and sys.platform != self.only_on:
            names.append(self.only_on)
        return names + [file for file in self.files if not Path(file).exists()]


REQUIREMENTS: Mapping[Feature, Requirement] = {
    # The cores that a process may use. Without: all cores of the machine.
    "core_affinity": Requirement(((os, "sched_getaffinity"),)),
    # A thread that gives way to all others. Without: saves in the background have normal priority.
    "idle_threads": Requirement(((os, "sched_setscheduler"), (os, "SCHED_IDLE"))),
    # A thread that does not preempt others. Without: Gloo's threads may preempt the computing one.
    "batch_threads": Requirement(((os, "sched_setscheduler"), (os, "SCHED_BATCH")), ("/proc/self/task",)),
    # Files in memory that other processes open. Without: no recovery, and no last action of an actor that has died.
    "memory_files": Requirement(((os, "memfd_create"), (os, "posix_fallocate")), ("/proc/self/fd",)),
    # A process that is ended by a descriptor, and never another with its number. Without: no recovery.
    "process_handles": Requirement(((os, "pidfd_open"), (signal, "pidfd_send_signal"))),
    # Processes and when each began. Without: doctor does not look for what earlier Rays left behind.
    "process_list": Requirement(files=("/proc/self/stat",)),
    # Files in memory, in a folder. Without: the object store of raypar's own Ray is in files below TMPDIR.
    "shared_memory_folder": Requirement(files=("/dev/shm",)),
    # Pages that madvise gives back at once. Without: the allocator decides when memory goes back to the system.
    "released_pages": Requirement(((mmap, "MADV_DONTNEED"), (mmap, "MADV_HUGEPAGE")), only_on="linux"),
    # Gloo's transport "tcp", where a late wait closes the group's connections at both ends. Elsewhere it is "uv", where
    # it closes none. Without: waits look for an abort themselves, and peers hear of it from the driver.
    "closing_connections": Requirement(only_on="linux"),
}


def has_feature(feature: Feature) -> bool:
    """Return whether this system has a feature."""
    return not REQUIREMENTS[feature].missing()
