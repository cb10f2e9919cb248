"""Snapshots in memory that are written as shards of a checkpoint, whose format they have."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from raypar.actors.checkpoint.memory_snapshot import SnapshotFiles
from raypar.actors.checkpoint.shards import ShardFile
from raypar.actors.checkpoint.snapshot import Written
from raypar.actors.checkpoint.snapshot_address import SnapshotOwner
from raypar.actors.files import checkpoint_errors, write_whole


def write_snapshots(files: SnapshotFiles, step: int, shares: Iterable[SnapshotOwner], folder: Path) -> list[Written]:
    """Write snapshots of a step as shards.

    Args:
        files: Memory files, with those snapshots among them.
        step: Number of steps taken.
        shares: Whose snapshots.
        folder: Folder of the checkpoint.

    Returns:
        The shard files, each with its logical tensors; none of those that hold nothing.

    Raises:
        CheckpointError: The disk does not allow it.
        KeyError: One of them is not here.
    """
    found = list[Written]()
    for share in shares:
        if not (tensors := files.at(step, [share])):
            continue
        name = f"rank{share.rank}.safetensors"
        with (
            checkpoint_errors(f"{str(folder / name)!r} can't be written"),
            files.open(str(share.rank)) as opened,
            mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as content,
            memoryview(content) as view,
        ):
            size, sha256 = write_whole(folder / name, [view])
        there = {
            key: replace(one, slices=tuple(replace(part, file=name) for part in one.slices))
            for key, one in tensors.items()
        }
        found.append((ShardFile(name, size, sha256), there))
    return found
