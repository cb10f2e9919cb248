"""All-gather of bytes among the members of a group over a store, with few requests in groups of any size.

Every member registers once, under its key. In a small group each then requests all other registrations at once. In a
group of more than FAN_IN + 1 the members form a tree in which each has up to FAN_IN children: member 0 is the root,
its children are 1 to 32, those of member 1 are 33 to 64, and so on. A member with children waits for all of them at
once and passes on their data; member 0 publishes one table, and all others wait for that one key.

So a member makes two requests to the store, or up to four if it has children, in a group of any size. A request is a
call of the store: to set a key, or to get at most FAN_IN keys that are there by then. Repeated requests for keys that
are not there yet come on top: the store decides how often (KVStore: ever less often).

``ExchangedStore`` is for code that gets a key of each member: the members exchange all keys at once instead.
"""

from __future__ import annotations

import secrets
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, Final

from torch.distributed import PrefixStore, Store

FAN_IN: Final = 32  # children of a member
_NAMED = 16  # missing ranks that a message names
_NONCE = 8  # bytes that distinguish two registrations of one rank
_TABLE = "table"  # the key of the table, or of a message that says why there is none
_WHOLE = b"+"  # the first byte of a table
_FAILED = b"-"  # the first byte of a message


def gather_objects(store: Store, rank: int, size: int, own: bytes, seconds: float) -> list[bytes]:
    """Return the data of all members, in rank order. Every member must call it.

    Args:
        store: Store for the exchange; its keys must be new.
        rank: Rank of this member.
        size: Number of members.
        own: The data of this member.
        seconds: Timeout.

    Raises:
        TimeoutError: A member, named in the message, did not come in time; or another member has given up.
        RuntimeError: Another process has registered as the same rank.
    """
    deadline = time.monotonic() + seconds
    own = secrets.token_bytes(_NONCE) + own
    _register(store, rank, own)
    try:
        if size <= FAN_IN + 1:
            keys = {peer: _member(peer) for peer in range(size) if peer != rank}
            entries = {rank: own} | dict(zip(keys, _values_of(store, [*keys.values()], deadline), strict=True))
        else:
            entries = _from_tree(store, rank, size, own, deadline)
    except _GivenUpError as error:
        raise TimeoutError(str(error)) from None
    except (RuntimeError, TimeoutError) as error:
        raise TimeoutError(_given_up(store, size, seconds)) from error
    return [entries[peer][_NONCE:] for peer in range(size)]


def children(rank: int, size: int) -> range:
    """Return the members whose registrations a member gathers."""
    return range(min(size, FAN_IN * rank + 1), min(size, FAN_IN * (rank + 1) + 1))


class _GivenUpError(Exception):
    """Another member has given up, and has published why."""


def _register(store: Store, rank: int, own: bytes) -> None:
    """Set the data of this member. Raises RuntimeError if a process has registered as this rank before."""
    anything: Any = store  # torch types values as str, and takes bytes
    if anything.compare_set(_member(rank), "", own) != own:
        raise RuntimeError(f"another process has joined as rank {rank}")


def _set(store: Store, key: str, data: bytes) -> None:
    anything: Any = store  # as above
    anything.set(key, data)


def _member(rank: int) -> str:
    """Return the key of a member's data."""
    return f"member/{rank}"


def _subtree(rank: int) -> str:
    """Return the key of the data of a member with children and of all its descendants."""
    return f"subtree/{rank}"


def _from_tree(store: Store, rank: int, size: int, own: bytes, deadline: float) -> dict[int, bytes]:
    """Return the data of each member, through the tree. Raises _GivenUpError if a member has given up."""
    below = children(rank, size)
    entries = {rank: own}
    keys = [_subtree(child) if children(child, size) else _member(child) for child in below]
    for child, data in zip(below, _values_of(store, keys, deadline), strict=True):
        entries |= _unpack(data) if children(child, size) else {child: data}
    if rank == 0:
        _set(store, _TABLE, _WHOLE + zlib.compress(_pack(entries), 1))
        return entries
    if below:
        _set(store, _subtree(rank), _pack(entries))
    (table,) = _values_of(store, [_TABLE], deadline)
    if table.startswith(_FAILED):
        raise _GivenUpError(table[1:].decode())
    return _unpack(zlib.decompress(table[1:]))


def _values_of(store: Store, keys: Sequence[str], deadline: float) -> list[bytes]:
    """Return the values of some keys, once all are there."""
    if keys:
        store.wait([*keys], timedelta(seconds=left(deadline)))
    return [store.get(key) for key in keys]


def _pack(entries: Mapping[int, bytes]) -> bytes:
    return pack_parts([struct.pack(f"<{len(entries)}i", *entries), *entries.values()])


def _unpack(data: bytes) -> dict[int, bytes]:
    """Return the data of members, by rank."""
    members, *parts = unpacked(data)
    return dict(zip(struct.unpack(f"<{len(parts)}i", members), parts, strict=True))


def pack_parts(parts: Sequence[bytes]) -> bytes:
    """Return several parts as one: how many they are, the length of each (int32), and the parts."""
    return b"".join([struct.pack(f"<{len(parts) + 1}i", len(parts), *map(len, parts)), *parts])


def unpacked(data: bytes) -> list[bytes]:
    """Return the parts that ``pack_parts`` has packed."""
    (count,) = struct.unpack_from("<i", data)
    lengths = struct.unpack_from(f"<{count}i", data, 4)
    ends = list(accumulate(lengths, initial=4 * (count + 1)))
    return [data[start:end] for start, end in pairwise(ends)]


# --- when it fails ---


def _given_up(store: Store, size: int, seconds: float) -> str:
    """Return which members are missing, and publish it for those that still wait, now or later."""
    if store.check([_TABLE]):
        table = store.get(_TABLE)
        return table[1:].decode() if table.startswith(_FAILED) else "the others went on without this member"
    missing = _absent(store, range(size), _NAMED + 1)
    if missing:
        why = f"{ranks(missing)} of {size} did not come within {seconds:g} s"
    else:
        why = f"all {size} members came, but rank {_silent(store, size)} did not go on within {seconds:g} s"
    _set(store, _TABLE, _FAILED + why.encode())
    return why


def ranks(of: Sequence[int]) -> str:
    """Format ranks; of many, only the first."""
    more = ", ..." if len(of) > _NAMED else ""
    return f"rank{'s' if len(of) > 1 else ''} {', '.join(map(str, of[:_NAMED]))}{more}"


def _absent(store: Store, among: range, most: int) -> list[int]:
    """Return the first members that have not registered, at most ``most``, by bisection."""
    if not among or most <= 0 or store.check([_member(rank) for rank in among]):
        return []
    if len(among) == 1:
        return [among[0]]
    half = len(among) // 2
    found = _absent(store, among[:half], most)
    return found + _absent(store, among[half:], most - len(found))


def _silent(store: Store, size: int) -> int:
    """Return the member that has all its data and has not passed it on."""
    inner = [rank for rank in range(1, size) if children(rank, size)]
    waiting = [rank for rank in inner if not store.check([_subtree(rank)])]
    return max(waiting, default=0)  # its descendants have higher ranks


def left(deadline: float) -> float:
    """Return the seconds until a deadline, at least a millisecond."""
    return max(0.001, deadline - time.monotonic())


class ExchangedStore(Store):
    """A store over ``gather_objects``: all new keys go to all members when a member first gets a key that it lacks.

    Torch's ProcessGroupGloo gets the keys of each member. Over this store it finds them in the local process. All
    members must equally often get keys that they lack.

    Args:
        store: Store for the exchange; its keys must be new.
        rank: Rank of this member.
        size: Number of members.
        seconds: Timeout of an exchange.
    """

    def __init__(self, store: Store, rank: int, size: int, seconds: float) -> None:
        super().__init__()
        self._store, self._seconds = store, seconds
        self._rank, self._size = rank, size
        self._new, self._known, self._rounds = dict[str, bytes](), dict[str, bytes](), 0

    def set(self, key: str, value: Any) -> None:
        self._new[key] = self._known[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        while not self.check(keys):
            store = PrefixStore(f"round{self._rounds}", self._store)
            own = [part for key, data in self._new.items() for part in (key.encode(), data)]
            self._new, self._rounds = {}, self._rounds + 1
            for packed in gather_objects(store, self._rank, self._size, pack_parts(own), self._seconds):
                parts = unpacked(packed)
                self._known |= {key.decode(): data for key, data in zip(parts[::2], parts[1::2], strict=True)}
