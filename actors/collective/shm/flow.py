"""Flows: ops in progress that process a tensor in segments, through a pipeline of steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

AHEAD = 8  # segments by which the first step may lead the last: they take memory until read


@dataclass(eq=False, kw_only=True)
class OpInProgress(ABC):
    """An op in progress, which a mailbox advances.

    Attributes:
        peers: Ranks that the op needs to complete.
        queue: (source, tag). Flows of one queue take their segments one after the other, in the order of their
            start. None for no queue.
        error: Why the flow failed; None if it has not.
        over: Whether the flow has completed or failed.
        ahead: Segments that take memory now.
    """

    peers: Collection[int]
    queue: tuple[int, int] | None = None
    error: Exception | None = field(default=None, init=False)
    over: bool = field(default=False, init=False)
    ahead: int = field(default=0, init=False)

    def needs(self, peer: int) -> bool:
        """Return whether the loss of ``peer``, one of ``peers``, would keep the flow from completing."""
        return True

    def advance(self, most: int) -> bool:
        """Do what can be done now. Exceptions are stored in ``error``.

        Args:
            most: Number of segments that may take memory at a time.

        Returns:
            Whether to advance the flows again: this one has processed a segment or is over.
        """
        try:
            return self._advance(most)
        except Exception as error:
            self.error, self.over = error, True
            return True

    @abstractmethod
    def _advance(self, most: int) -> bool: ...


class FlowStep(NamedTuple):
    """One step of a flow's pipeline.

    Attributes:
        ready: Returns whether segment k can be processed now.
        do: Processes segment k.
    """

    ready: Callable[[int], bool]
    do: Callable[[int], object]


@dataclass(eq=False)
class Segments(OpInProgress):
    """A flow of ``count`` segments through ``steps``.

    Of the steps that are ready, the last one runs first, because data that has just arrived is still in cache. See
    ``OpInProgress`` for the other attributes.

    Attributes:
        count: Number of segments.
        steps: The steps, each of which processes the segments in order and never overtakes the step before it.
        copies: Whether a segment takes memory between the first step and the last.
    """

    count: int
    steps: Sequence[FlowStep]
    copies: bool = False

    def __post_init__(self) -> None:
        self._done = [0] * len(self.steps)
        self.over = not self.count

    def _advance(self, most: int) -> bool:
        """Advance by at most one segment of the first step, so that what arrives meanwhile is still in cache."""
        done, before = self._done, list(self._done)
        while done[0] == before[0] and self._one(most):
            pass
        self.over = done[-1] == self.count
        self.ahead = done[0] - done[-1] if self.copies else 0
        return done != before

    def _one(self, most: int) -> bool:
        done = self._done
        for number in range(len(done) - 1, -1, -1):
            segment = done[number]
            limit = done[number - 1] if number else min(self.count, done[-1] + most if self.copies else self.count)
            if segment < limit and self.steps[number].ready(segment):
                self.steps[number].do(segment)
                done[number] += 1
                return True
        return False


def always(segment: int) -> bool:
    """Return True: the ``ready`` of a step that never has to wait."""
    return True


def nothing(*_: object) -> None:
    """Do nothing: the ``do`` of a step that only waits."""
