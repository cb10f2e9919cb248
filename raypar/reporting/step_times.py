"""The times of steps: what a failure has cost, and stragglers, which compute much longer than their peers."""

from __future__ import annotations

import logging
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence

from raypar.actors.mesh.world import World
from raypar.schedules.float_sum import float_sum

log = logging.getLogger(__name__)
_TIMES = 1.5  # how many times as long as its peers a straggler computes
_STEPS = 10  # for how many steps on end


class StepTimes:
    """Keeps how long each step took, to know what it costs to take it again."""

    def __init__(self) -> None:
        self._steps, self._seconds = array("q"), array("d")

    def keep(self, step: int, seconds: float) -> None:
        """Note that a step, counted from 0, was taken."""
        self._steps.append(step)
        self._seconds.append(seconds)

    def lost(self, start: float, back_to: int) -> float:
        """Return the seconds that a failure has cost until now.

        Args:
            start: When the work that failed was begun, in seconds of time.perf_counter.
            back_to: Number of steps taken that the run goes on after; later ones are taken again.
        """
        again = (seconds for step, seconds in zip(self._steps, self._seconds, strict=True) if step >= back_to)
        return time.perf_counter() - start + float_sum(again)

    def go_back(self, back_to: int) -> None:
        """Forget the steps that are taken again."""
        while self._steps and self._steps[-1] >= back_to:
            self._steps.pop()
            self._seconds.pop()


class Stragglers:
    """Watches how long actors compute. The peers of an actor are those of its pipeline rank and kind, with equal work.

    Args:
        world: The ranks of the run.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._peers = defaultdict[tuple[int, bool], list[int]](list)
        for rank in world.trainers:
            self._peers[world.pp(rank), world.is_expert(rank)].append(rank)
        self._late = dict.fromkeys(world.trainers, 0)  # by rank, steps on end

    def warn(self, step: int, busy: Sequence[float]) -> None:
        """Log a warning of each actor that has just become a straggler; see ``of``."""
        for warning in self.of(step, busy):
            log.warning("%s", warning)

    def of(self, step: int, busy: Sequence[float]) -> Iterator[str]:
        """Yield a warning for each actor that has just become a straggler.

        Args:
            step: The step, counted from 1.
            busy: Seconds of compute of each actor in it, by rank.
        """
        for ranks in self._peers.values():
            for rank, usual in zip(ranks, _medians_of_others([busy[rank] for rank in ranks]), strict=True):
                is_late = usual > 0 and busy[rank] > _TIMES * usual
                self._late[rank] = self._late[rank] + 1 if is_late else 0
                if self._late[rank] == _STEPS:
                    times = f"{busy[rank] * 1e3:.0f} and {usual * 1e3:.0f} ms in step {step}"
                    yield (
                        f"straggler: {self._world.label(rank)} has computed more than {_TIMES:g} times as long as its "
                        f"peers for {_STEPS} steps ({times}): see what else runs on its machine (job.who() names it)"
                    )


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each value the median of all others; of a single value, itself."""
    if len(values) == 1:
        return list(values)
    order = sorted(range(len(values)), key=values.__getitem__)
    positions = {number: position for position, number in enumerate(order)}
    below, above = (len(values) - 2) // 2, (len(values) - 1) // 2  # in the middle of the others

    def other(position: int, number: int) -> float:
        return values[order[position + (position >= positions[number])]]

    return [(other(below, number) + other(above, number)) / 2 for number in range(len(values))]
