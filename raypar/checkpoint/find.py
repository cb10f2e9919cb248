"""Find checkpoints by listing their folder: no file points to the newest one. Take the averages of one as weights."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from raypar.actors.errors import CheckpointError
from raypar.actors.machine.files import checkpoint_errors
from raypar.checkpoint.check import look, verified
from raypar.checkpoint.manifest import Manifest
from raypar.errors import ConfigError
from raypar.paths import checkpoints, checkpoints_in, step_of

log = logging.getLogger(__name__)
_MOST_STEPS = 10  # steps that a message names


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint of which every byte was verified.

    Attributes:
        path: The checkpoint's folder.
        manifest: Its manifest.
    """

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class Listed:
    """A checkpoint as ``ls`` lists it. Only its manifest was read, not its shards.

    Attributes:
        path: The checkpoint's folder.
        step: Number of steps after which it was saved.
        size: Bytes of its tensors; 0 if the manifest can't be read.
        tensors: Number of logical tensors; 0 if the manifest can't be read.
        of_optimizer: How many of them are the optimizer's state, such as running means of gradients.
        faults: Faults of the manifest.
    """

    path: Path
    step: int
    size: int
    tensors: int
    of_optimizer: int
    faults: list[str]


def newest(folder: Path) -> VerifiedCheckpoint | None:
    """Return the newest sound checkpoint in a folder, after reading every byte of it; None if there is none.

    Newer checkpoints that are not sound are logged with their faults.

    Raises:
        CheckpointError: The folder can't be read.
    """
    for _, path in listed(folder):
        try:
            return VerifiedCheckpoint(path, verified(path))
        except CheckpointError as error:
            log.warning("%s is skipped:\n%s", path, error)
    return None


def ls(folder: Path) -> list[Listed]:
    """Return the checkpoints in a folder, newest first. Raises CheckpointError if the folder can't be read."""
    lines = []
    for step, path in listed(folder):
        manifest, faults = look(path)
        size = sum(logical.nbytes for logical in manifest.tensors.values()) if manifest else 0
        names = list(manifest.tensors) if manifest else []
        of_optimizer = sum(name.startswith("optim.") for name in names)
        lines.append(Listed(path, step, size, len(names), of_optimizer, faults))
    return lines


def newest_listed(folder: Path) -> Listed | None:
    """Return the newest checkpoint in a folder with a sound manifest; None if there is none, or no such folder."""
    with suppress(CheckpointError):
        return next((one for one in ls(folder) if not one.faults), None)
    return None


def instead_of(path: Path) -> str:
    """Return a message with the checkpoints beside a missing one; "" if it exists, or if there are no others."""
    if os.path.lexists(path) or step_of(path.name) is None:
        return ""
    try:
        steps = [step for step, _ in listed(checkpoints_in(path.parent))]
    except CheckpointError:
        return ""
    if not steps:
        return ""
    named = ", ".join(f"{step:,}" for step in steps[:_MOST_STEPS])
    more = f" and {len(steps) - _MOST_STEPS:,} earlier ones" if len(steps) > _MOST_STEPS else ""
    return f"{str(path)!r} is not there: {str(path.parent)!r} has checkpoints after step {named}{more}"


def listed(folder: Path) -> list[tuple[int, Path]]:
    """Return step and path of every checkpoint in a folder, sound or not, newest first.

    Raises CheckpointError if the folder can't be read.
    """
    with checkpoint_errors(f"{str(folder)!r} can't be read"):
        return checkpoints(folder)


def averaged(found: VerifiedCheckpoint) -> VerifiedCheckpoint:
    """Return a checkpoint with the averages instead of the weights, and without the optimizer's state.

    Args:
        found: The checkpoint of a run with ``ema``.

    Raises:
        ConfigError: It has no averages.
    """
    from raypar.actors.checkpoint.snapshot import AVERAGE, logical_name  # imports torch

    tensors = {name: one for name, one in found.manifest.tensors.items() if not name.startswith("optim.")}
    means = {
        name: found.manifest.tensors[kept]
        for name in tensors
        if (kept := logical_name(name, AVERAGE)) in found.manifest.tensors
    }
    if not means:
        fix = "leave ema out, or train with ema 0.999, say, which keeps them"
        raise ConfigError([f"{str(found.path)!r} has no averages of its weights: {fix}"])
    return replace(found, manifest=replace(found.manifest, tensors=tensors | means))
