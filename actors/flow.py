"""An op as it moves on: steps that each work through the same pieces, one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

# pieces by which the first step may be ahead of the last one: until they are read they take memory
_AHEAD = 8


class Step(NamedTuple):
    """``do(k)`` handles piece k, as soon as ``ready(k)``."""

    ready: Callable[[int], bool]
    do: Callable[[int], object]


class Flow:
    """``count`` pieces that go through ``steps``; the last step goes first where it can, as what arrives is in cache.

    peers  those without whom it can't be finished
    """

    def __init__(self, count: int, steps: Sequence[Step], peers: Iterable[int]) -> None:
        self.peers = frozenset(peers)
        self.error: Exception | None = None
        self._count, self._steps, self._done = count, steps, [0] * len(steps)

    @property
    def over(self) -> bool:
        return self.error is not None or self._done[-1] == self._count

    def advance(self) -> bool:
        """Do what can be done now, but at most one piece of the first step; whether anything was done.

        So pieces that arrive meanwhile can be taken while they are in cache. What goes wrong is kept in ``error``.
        """
        done = list(self._done)
        try:
            while self._done[0] == done[0] and self._one():
                pass
        except Exception as error:
            self.error = error
        return self._done != done

    def _one(self) -> bool:
        done = self._done
        for number in range(len(done) - 1, -1, -1):
            piece = done[number]
            limit = done[number - 1] if number else min(self._count, done[-1] + _AHEAD)
            if piece < limit and self._steps[number].ready(piece):
                self._steps[number].do(piece)
                done[number] += 1
                return True
        return False
