"""Snapshots of actors' states in shared memory that outlives the actors: a job resumes from them after a death.

An actor copies its share of the state into a memory file after a step. The other processes of its node hold that file
open, so it outlives the actor. A memory file has no name: it ends with the last process that holds it. It has the
format of a checkpoint's shard: any actor in any layout can read it, and it can be written into a checkpoint as it is.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from raypar.actors.checkpoint.logical import Logical, Shape, in_files, merged, plain_slice, slice_from
from raypar.actors.checkpoint.reports import Written
from raypar.actors.checkpoint.shards import AtHand, ShardFile, logical_tensors, spelled_dtype
from raypar.actors.checkpoint.snapshot_address import Address, SnapshotOwner
from raypar.actors.errors import CheckpointError
from raypar.actors.machine.files import checkpoint_errors, write_whole
from raypar.actors.machine.memory_files import reserve
from raypar.actors.machine.process_identity import ProcessIdentity, open_files
from raypar.actors.safetensors_header import beginning_of, read_beginning
from raypar.actors.sharding import Shard
from raypar.actors.tensors import nbytes

_UNFINISHED = "-" * 15  # instead of the step while a snapshot is written
_ALIGNMENT = 64  # bytes
_Layout = tuple[tuple[str, torch.dtype, Shape], ...]


class Slots:
    """An actor's own snapshots, in memory files in turn: the one before is whole while the next one is written.

    Args:
        rank: The actor's rank.
        files: Number of files: two, or three if two may be ``pinned``. A file takes memory at its first snapshot.

    Attributes:
        pinned: Steps whose snapshots are not written over, as they belong to copies on other nodes.
    """

    def __init__(self, rank: int, files: int = 2) -> None:
        self._rank, self.pinned = rank, frozenset[int]()
        self._slots = tuple(_Slot() for _ in range(files))

    def take(
        self,
        step: int,
        tensors: Iterable[tuple[str, Tensor]],
        shards: Mapping[str, Shard],
        at: AtHand,
        copied: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy tensors into the oldest slot that is not pinned; into the newest one only if all others are pinned.

        Args:
            step: Number of steps taken.
            tensors: Pairs of a logical name and a tensor, on any device.
            shards: By name, the part of its logical tensor that a tensor is; tensors without an entry are whole.
            at: Returns a context in which some tensors can be read.
            copied: Called when all is copied, and not marked as whole yet.

        Raises:
            OSError: There is no memory left for it.
        """
        newest = max(self.steps, default=0)
        free = [slot for slot in self._slots if slot.step not in self.pinned]
        older = min(free, key=lambda slot: (slot.step == newest, not slot.has_memory, slot.step or 0))
        older.fill(self._rank, dict(tensors), shards, at)
        copied()
        older.finish(step)

    def forget_after(self, step: int) -> None:
        """Forget snapshots of later steps, which are taken again."""
        for slot in self._slots:
            if slot.step is not None and slot.step > step:
                slot.forget()

    @property
    def steps(self) -> set[int]:
        """The steps of which there is a whole snapshot."""
        return {slot.step for slot in self._slots if slot.step}

    def close(self) -> None:
        """Close the files."""
        for slot in self._slots:
            os.close(slot.fd)

    def file(self, step: int) -> int:
        """Return the descriptor of the file with the whole snapshot of a step."""
        return next(slot.fd for slot in self._slots if slot.step == step)

    @property
    def files(self) -> tuple[int, ...]:
        """The descriptors of the files."""
        return tuple(slot.fd for slot in self._slots)


class HeldMemoryFiles:
    """The memory files of other actors that this process holds open.

    Args:
        own: The identity of this process.
    """

    def __init__(self, own: ProcessIdentity) -> None:
        self._own = own
        self._files: dict[SnapshotOwner, dict[int, int]] = {}  # by share and inode, the descriptor
        self._written = set[int]()  # inodes of the files that living actors write to

    def hold(self, addresses: Iterable[Address]) -> None:
        """Hold the files at these addresses, each once, except those that this process can't open."""
        for address in addresses:
            if address.process.pid_domain != self._own.pid_domain or address.process == self._own:
                continue
            with suppress(OSError):  # the process has just died
                for fd in open_files(address.process, address.files):
                    if address.is_written:
                        self._written.add(os.fstat(fd).st_ino)
                    self._keep(address.share, fd)

    def adopt(self, share: SnapshotOwner, files: Iterable[int]) -> None:
        """Take over files to which this process writes, or has written in an earlier layout."""
        for fd in files:
            self._keep(share, fd)

    def drop_old(self) -> None:
        """Close the files that no living actor writes to: those of replaced actors, and copies."""
        for files in self._files.values():
            for inode in [inode for inode in files if inode not in self._written]:
                os.close(files.pop(inode))

    def expect_new(self) -> None:
        """Regard all files as old, until their actors report that they write to them."""
        self._written.clear()

    def files(self) -> dict[SnapshotOwner, tuple[int, ...]]:
        """Return the descriptors of all files that are held, by share."""
        return {share: tuple(files.values()) for share, files in self._files.items() if files}

    def addresses(self) -> list[Address]:
        """Return the addresses of these files for other processes."""
        return [Address(share, self._own, files) for share, files in self.files().items()]

    def close(self) -> None:
        """Close all files."""
        self._written.clear()
        self.drop_old()
        self._files.clear()

    def _keep(self, share: SnapshotOwner, fd: int) -> None:
        files, inode = self._files.setdefault(share, {}), os.fstat(fd).st_ino
        if inode in files:
            os.close(fd)
        else:
            files[inode] = fd


class SnapshotFiles:
    """Memory files of snapshots, as a source of shards: the file of rank 3 is named "3".

    Args:
        files: For each share, the descriptors of its files, of any steps.
    """

    def __init__(self, files: Mapping[SnapshotOwner, Sequence[int]]) -> None:
        found = {one: {step: fd for fd in kept if (step := _step_of(fd)) is not None} for one, kept in files.items()}
        self._files = {share: steps for share, steps in found.items() if steps}
        self._chosen: dict[str, int] = {}  # by name, the descriptor

    def steps(self) -> dict[SnapshotOwner, tuple[int, ...]]:
        """Return, by share, the steps of which there is a whole snapshot."""
        return {share: tuple(sorted(steps)) for share, steps in self._files.items()}

    def file(self, share: SnapshotOwner, step: int) -> int:
        """Return the descriptor of a file. Raises KeyError if there is none of this step."""
        return self._files[share][step]

    def at(self, step: int, shares: Iterable[SnapshotOwner]) -> dict[str, Logical]:
        """Choose the snapshots of one step, which ``open`` and ``header`` then read.

        Args:
            step: Number of steps taken.
            shares: All shares of the state, of one layout.

        Returns:
            The logical tensors by name.

        Raises:
            KeyError: A share has no snapshot of this step here.
        """
        self._chosen = {str(share.rank): self._files[share][step] for share in shares}
        parts = dict[str, list[Logical]]()
        for fd in self._chosen.values():
            for name, part in _Header.of(fd).tensors.items():
                parts.setdefault(name, []).append(part)
        return {name: merged(found) for name, found in parts.items()}

    def header(self, file: str) -> Mapping[str, tuple[str, Shape]]:
        """Return dtype and shape of each tensor of a rank's file."""
        return _Header.of(self._chosen[file]).kinds

    def open(self, file: str) -> FileIO:
        """Open a rank's file for reading."""
        return (Path("/proc/self/fd") / str(self._chosen[file])).open("rb", buffering=0)


class _Slot:
    """A memory file with space for one snapshot.

    Attributes:
        fd: Its descriptor.
        step: Number of steps taken before the snapshot; None if there is no whole one.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("raypar-snapshot")
        self.step: int | None = None
        self._layout: _Layout = ()
        self._map: mmap.mmap | None = None
        self._tensors: dict[str, Tensor] = {}
        self._mark_at = 0

    def fill(self, rank: int, tensors: dict[str, Tensor], shards: Mapping[str, Shard], at: AtHand) -> None:
        """Copy tensors; see ``Slots.take``."""
        self.forget()
        layout = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
        if self._map is None or layout != self._layout:
            self._lay_out(rank, tensors, shards)
            self._layout = layout
        for name, tensor in tensors.items():
            with at([tensor]):
                self._tensors[name].copy_(tensor.detach())

    @property
    def has_memory(self) -> bool:
        """Whether it has memory yet."""
        return self._map is not None

    def finish(self, step: int) -> None:
        """Mark the snapshot as that after ``step`` steps."""
        self._mark(f"{step:015}")
        self.step = step

    def forget(self) -> None:
        """Make the snapshot invalid."""
        self.step = None
        if self._map is not None:
            self._mark(_UNFINISHED)

    def _lay_out(self, rank: int, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> None:
        """Write the header for tensors of these kinds, and reserve memory for their data."""
        header = _Header.for_tensors(rank, tensors, shards)
        beginning = header.beginning(tensors)
        at = len(beginning)
        size = at + sum(nbytes(tensor) for tensor in tensors.values())
        self._tensors.clear()
        self._map = None  # its tensors are gone, and the old mapping with them
        os.ftruncate(self.fd, 0)
        reserve(self.fd, 0, size)
        os.pwrite(self.fd, beginning, 0)
        self._map, self._mark_at = mmap.mmap(self.fd, size), beginning.index(_UNFINISHED.encode())
        data = torch.frombuffer(self._map, dtype=torch.uint8)
        for name in header.kinds:
            tensor = tensors[name]
            start, at = at, at + nbytes(tensor)
            self._tensors[name] = data[start:at].view(tensor.dtype).view(tensor.shape)

    def _mark(self, text: str) -> None:
        assert self._map is not None
        self._map[self._mark_at : self._mark_at + len(text)] = text.encode()


@dataclass(frozen=True)
class _Header:
    """The header of a snapshot: that of a safetensors file, with the slices of logical tensors in it.

    Attributes:
        step: Number of steps taken; None if the snapshot is not whole.
        kinds: Dtype and shape of each tensor, in the order in the file.
        tensors: The logical tensors, each with its slices in this file.
    """

    step: int | None
    kinds: dict[str, tuple[str, Shape]]
    tensors: dict[str, Logical]

    @classmethod
    def for_tensors(cls, rank: int, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> _Header:
        """Describe tensors of a rank, the widest dtypes first, so that all are aligned."""
        ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
        logical = logical_tensors(str(rank), ordered, shards)
        kinds = {name: (spelled_dtype(name, tensor), tuple(tensor.shape)) for name, tensor in ordered.items()}
        return cls(None, kinds, logical)

    @classmethod
    def of(cls, fd: int) -> _Header:
        """Read the header of a memory file."""
        found, about = read_beginning(fd, "a snapshot")
        kinds = {name: (one.dtype, one.shape) for name, one in found.items()}
        tensors = {
            name: Logical(dtype, tuple(shape), tuple(map(slice_from, slices)))
            for name, (dtype, shape, slices) in json.loads(about["tensors"]).items()
        }
        step = None if about["step"] == _UNFINISHED else int(about["step"])
        return cls(step, kinds, tensors)

    def beginning(self, tensors: Mapping[str, Tensor]) -> bytes:
        """Return the beginning of a file for tensors of these kinds, after which their data is aligned."""
        about = {name: [one.dtype, one.shape, [*map(plain_slice, one.slices)]] for name, one in self.tensors.items()}
        kinds = [(name, *kind, nbytes(tensors[name])) for name, kind in self.kinds.items()]
        return beginning_of(kinds, {"step": _UNFINISHED, "tensors": json.dumps(about)}, _ALIGNMENT)


def _step_of(fd: int) -> int | None:
    """Return the step of the snapshot in a memory file; None if it is incomplete, such as a copy under way."""
    with suppress(CheckpointError, ValueError):  # the header is invalid while another copy arrives
        step = _Header.of(fd).step
        return step if any(os.pread(fd, 8, 0)) else None
    return None


def write_snapshots(files: SnapshotFiles, step: int, shares: Iterable[SnapshotOwner], folder: Path) -> list[Written]:
    """Write snapshots of a step as shards.

    Args:
        files: Memory files, which include those snapshots.
        step: Number of steps taken.
        shares: Whose snapshots.
        folder: Folder of the checkpoint.

    Returns:
        The shard files that are not empty, each with its logical tensors.

    Raises:
        CheckpointError: The disk does not allow it.
        KeyError: This process does not have one of them.
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
        there = {key: in_files(one, {str(share.rank): name}.__getitem__) for key, one in tensors.items()}
        found.append((ShardFile(name, size, sha256), there))
    return found
