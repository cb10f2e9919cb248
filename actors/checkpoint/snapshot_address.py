"""Addresses of snapshots: their owners, processes that have them, recipients of copies. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from raypar.actors.machine.process_identity import ProcessIdentity


class SnapshotOwner(NamedTuple):
    """The actor whose state a snapshot has.

    Attributes:
        layout: Number of the run's layout, which changes when the run goes on with other ranks.
        rank: The actor's rank in this layout.
    """

    layout: int
    rank: int


@dataclass(frozen=True)
class Address:
    """The address, for other processes, of memory files with snapshots of a rank.

    Attributes:
        share: The rank, in its layout.
        process: A process that has the files open.
        files: Their descriptors in it.
        is_written: Whether that process writes to them: the rank's actor, or an actor that receives copies.
    """

    share: SnapshotOwner
    process: ProcessIdentity
    files: tuple[int, ...]
    is_written: bool = False


class Recipient(NamedTuple):
    """The recipient of an actor's copies.

    Attributes:
        host: The address of the buddy's node.
        port: The buddy's port there.
        token: A secret that proves that the sender is this actor.
    """

    host: str
    port: int
    token: str
