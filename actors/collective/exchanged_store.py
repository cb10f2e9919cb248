"""A store for code that gets a key of each member: the members exchange all keys at once instead."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store

from raypar.actors.collective.exchange import gather_objects, pack_parts, unpacked


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
