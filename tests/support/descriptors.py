"""The open files of this process, of which tests ask whether something has left more."""

from __future__ import annotations

from pathlib import Path


def descriptors() -> set[tuple[str, Path]]:
    """Return number and target of each descriptor. Those that earlier tests have left may be closed at any time."""
    found = set[tuple[str, Path]]()
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.add((link.name, link.readlink()))
        except OSError:  # that of the listing itself
            continue
    return found
