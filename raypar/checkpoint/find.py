"""Finding checkpoints: by looking, there is no file that points to the newest one."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from raypar.actors.errors import CheckpointError
from raypar.actors.files import told
from raypar.checkpoint.check import look, verified
from raypar.checkpoint.manifest import Manifest
from raypar.paths import checkpoints

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A checkpoint, every byte of which was verified."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class Listed:
    """A line of ``ls``.

    size     bytes of its shards; 0 if the manifest can't be read
    tensors  logical ones
    faults   of the manifest: the shards were not read
    """

    path: Path
    step: int
    size: int
    tensors: int
    faults: list[str]


def newest(folder: Path) -> Found | None:
    """The newest sound checkpoint in a folder, every byte of which was read; None if there is none.

    Each newer one that is not sound is logged, with all its faults. Raises CheckpointError if the folder can't be read.
    """
    for _, path in listed(folder):
        try:
            return Found(path, verified(path))
        except CheckpointError as error:
            log.warning("%s is skipped:\n%s", path, error)
    return None


def ls(folder: Path) -> list[Listed]:
    """The checkpoints in a folder, the newest first. Raises CheckpointError if it can't be read."""
    lines = []
    for step, path in listed(folder):
        manifest, faults = look(path)
        size = sum(file.size for file in manifest.files) if manifest else 0
        lines.append(Listed(path, step, size, len(manifest.tensors) if manifest else 0, faults))
    return lines


def listed(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of every checkpoint in a folder, sound or not, the newest first. Raises CheckpointError."""
    with told(f"{str(folder)!r} can't be read"):
        return checkpoints(folder)
