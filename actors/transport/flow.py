"""An op as it moves on: steps that each work through the same pieces, one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

AHEAD = 8  # pieces by which the first step may be ahead of the last one: until they are read they take memory


class Step(NamedTuple):
    """``do(k)`` handles piece k, as soon as ``ready(k)``."""

    ready: Callable[[int], bool]
    do: Callable[[int], object]


class Flow:
    """``count`` pieces that go through ``steps``; the last step goes first where it can, as what arrives is in cache.

    peers   those without whom it can't be finished
    copies  whether a piece takes memory of its own from the first step to the last one
    queue   flows of one queue take their pieces one after the other, in the order of their start (None: of no queue)
    """

    def __init__(
        self,
        count: int,
        steps: Sequence[Step],
        peers: Iterable[int],
        *,
        copies: bool = False,
        queue: tuple[int, int] | None = None,
    ) -> None:
        self.peers, self.queue = frozenset(peers), queue
        self.error: Exception | None = None
        self._count, self._steps, self._done, self._copies = count, steps, [0] * len(steps), copies

    @property
    def over(self) -> bool:
        return self.error is not None or self._done[-1] == self._count

    @property
    def ahead(self) -> int:
        """Pieces that take memory now."""
        return self._done[0] - self._done[-1] if self._copies else 0

    def advance(self, most: int) -> bool:
        """Do what can be done now, but at most one piece of the first step; of copies at most ``most`` pieces ahead.

        So pieces that arrive meanwhile can be taken while they are in cache. Returns whether anything was done; what
        goes wrong is kept in ``error``.
        """
        done = list(self._done)
        try:
            while self._done[0] == done[0] and self._one(most):
                pass
        except Exception as error:
            self.error = error
        return self._done != done

    def _one(self, most: int) -> bool:
        done = self._done
        for number in range(len(done) - 1, -1, -1):
            piece = done[number]
            limit = done[number - 1] if number else min(self._count, done[-1] + most if self._copies else self._count)
            if piece < limit and self._steps[number].ready(piece):
                self._steps[number].do(piece)
                done[number] += 1
                return True
        return False


def always(piece: int) -> bool:
    """A step that waits for nothing."""
    return True


def nothing(*_: object) -> None:
    """A step that only waits."""
