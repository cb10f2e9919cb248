"""What the attention of an actor's layers finds again: its scratch, and scores that wait for their backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import Tensor

from raypar.actors.models.scratch import Scores, Scratch, Size, all_scores

ROOM = 12 << 20  # bytes


class Kept:
    """The softmax of some heads' scores, block by block."""

    def __init__(self, like: Tensor, size: Size) -> None:
        self.size, self.bytes = size, like.itemsize * sum(size.scores)
        self.scores: list[Scores] = all_scores(like, size)


class Desk:
    """Scratch for heads of one size at a time, and at most ``room`` bytes of scores: what has no room is made again by
    its backward, of the same bits. A copy has memory of its own."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._scratch: list[Scratch] = []
        self._free: list[Kept] = []
        self._lent: WeakSet[Kept] = WeakSet()  # what is dropped with its graph, no backward gives back

    def __reduce__(self) -> tuple[Any, ...]:
        return Desk, (self._room,)

    @contextmanager
    def scratch(self, like: Tensor, size: Size) -> Iterator[Scratch]:
        """Scratch that nobody else has meanwhile: another thread gets its own."""
        found = self._scratch.pop() if self._scratch else None
        if found is None or found.size != size:
            found = Scratch(like, size)
        yield found
        self._scratch[:] = [found]

    def lend(self, like: Tensor, size: Size) -> Kept | None:
        """Memory for the scores of such heads, or None where there is no room."""
        self._free = [kept for kept in self._free if kept.size == size]
        if not self._free:
            if self._room < like.itemsize * sum(size.scores) + sum(lent.bytes for lent in self._lent):
                return None
            self._free.append(Kept(like, size))
        kept = self._free.pop()
        self._lent.add(kept)
        return kept

    def take_back(self, kept: Kept) -> None:
        """Somebody may have it again."""
        self._lent.discard(kept)
        self._free.append(kept)
