"""An op as it moves on: steps that each work through the same pieces, one behind the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

AHEAD = 8  # pieces by which the first step may be ahead of the last one: until they are read they take memory


class Flow(ABC):
    """What a mailbox moves on.

    peers  those without whom it can't be finished
    queue  flows of one queue take their pieces one after the other, in the order of their start (None: of no queue)
    over   whether nothing is left to do; with an ``error``, nothing can be done any more
    ahead  pieces that take memory now
    """

    def __init__(self, peers: Collection[int], queue: tuple[int, int] | None = None) -> None:
        self.peers, self.queue = peers, queue
        self.error: Exception | None = None
        self.over, self.ahead = False, 0

    def needs(self, peer: int) -> bool:
        """Whether it can't be finished any more if this one of ``peers`` is lost."""
        return True

    def advance(self, most: int) -> bool:
        """Do what can be done now, but take memory for at most ``most`` pieces; what goes wrong is kept in ``error``.

        Returns whether another look is worth while: something was taken, or is over.
        """
        try:
            return self._advance(most)
        except Exception as error:
            self.error, self.over = error, True
            return True

    @abstractmethod
    def _advance(self, most: int) -> bool: ...


class Step(NamedTuple):
    """``do(k)`` handles piece k, as soon as ``ready(k)``."""

    ready: Callable[[int], bool]
    do: Callable[[int], object]


class Pieces(Flow):
    """``count`` pieces that go through ``steps``; the last step goes first where it can, as what arrives is in cache.

    copies  whether a piece takes memory of its own from the first step to the last one
    """

    def __init__(
        self,
        count: int,
        steps: Sequence[Step],
        peers: Collection[int],
        *,
        copies: bool = False,
        queue: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(peers, queue)
        self._count, self._steps, self._done, self._copies = count, steps, [0] * len(steps), copies
        self.over = not count

    def _advance(self, most: int) -> bool:
        """At most one piece of the first step, so that pieces that arrive meanwhile can be taken while in cache."""
        done, before = self._done, list(self._done)
        while done[0] == before[0] and self._one(most):
            pass
        self.over = done[-1] == self._count
        self.ahead = done[0] - done[-1] if self._copies else 0
        return done != before

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
