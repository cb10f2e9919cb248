"""Where the snapshots of actors are: whose, in which process, and where copies of them go. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from raypar.actors.machine.process_identity import ProcessIdentity


class SnapshotOwner(NamedTuple):
    """Whose snapshot it is.

    Attributes:
        layout: Number of the layout of the run: it has another one after it went on with other ranks.
        rank: The rank in it.
    """

    layout: int
    rank: int


@dataclass(frozen=True)
class Address:
    """Where other processes find memory files with snapshots of a rank.

    Attributes:
        share: The rank, in its layout.
        process: A process that has the files open.
        files: Their descriptors in it.
        is_written: Whether that process writes to them: the rank's actor itself, or one that gets copies of its own.
    """

    share: SnapshotOwner
    process: ProcessIdentity
    files: tuple[int, ...]
    is_written: bool = False


class Recipient(NamedTuple):
    """Where an actor sends its copies.

    Attributes:
        host: The address of the buddy's node.
        port: The buddy's port there.
        token: A secret that proves that the sender is this actor.
    """

    host: str
    port: int
    token: str
