"""Groups over shared memory whose members meet in a store of their own, as ``cpu_group`` makes them."""

from __future__ import annotations

from contextlib import closing
from functools import partial

from raypar.actors.collective.group import GroupMember
from raypar.actors.collective.rendezvous import introduce
from raypar.actors.collective.shm.group import ShmGroup


def shm_group(name, axis, rank, size, timeout, *, store, connect_timeout=60.0):
    """A member of a group in which all members are on one node."""
    with closing(introduce(store, rank, size, connect_timeout)) as peers:
        member = GroupMember(name, axis, rank, size, timeout, connect_timeout)
        return ShmGroup(member, partial(peers.connect, range(size)))
