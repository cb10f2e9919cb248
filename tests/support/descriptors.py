"""The open files of this process, of which tests ask whether something has left more."""

from __future__ import annotations

import gc
from pathlib import Path


def descriptors() -> set[tuple[str, Path]]:
    """Return number and target of each descriptor.

    What earlier tests have left is closed first: else it would be at a time of chance, and new files might get the same
    numbers and targets.
    """
    gc.collect()
    found = set[tuple[str, Path]]()
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.add((link.name, link.readlink()))
        except OSError:  # that of the listing itself
            continue
    return found
