"""Steps that are handed to the actors before the report of the current one has arrived."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raypar.actors.errors import NonFiniteError
from raypar.actors.specs.run import Run
from raypar.cluster.calls.calls import Calls
from raypar.errors import JobError
from raypar.job.start.loaded_run import LoadedRun
from raypar.job.steps.executors import Executor, executor_of

log = logging.getLogger(__name__)


def steps_to_take(run: Run, taken: int, steps: int | None) -> int:
    """Return how many steps a training takes; log a warning if there are none left, or if it goes on beyond the last.

    Args:
        run: The run.
        taken: Number of steps taken.
        steps: How many are asked for; None for all that are left.
    """
    count = max(0, run.steps - taken) if steps is None else steps
    if steps is None and not count:
        log.warning("the run has taken all its %d steps: give train(steps=...) for more", run.steps)
    if count > 0 and taken + count > run.steps:
        log.warning(
            "the run has %d steps, and this goes on to step %d: later steps have the last step's learning rate",
            *(run.steps, taken + count),
        )
    return count


@dataclass
class StepsAhead:
    """Hands steps to the actors before the report of the current one has arrived, so that they never wait.

    Attributes:
        calls: Calls to the actors.
        executor: Makes the actors take a step.
        most: How many steps may be handed over beyond the current one.
        epoch: Epoch of the steps; see ``Lifetime``.
        copy_within: Returns in how many steps a copy of the snapshots after a step should be on other nodes.
        stream: Number of steps that actors take in one call, up to a multiple of it, because the schedule is
            asynchronous; 0 if they take one.

        since: When the actors have begun with the oldest step that they have, in seconds of ``time.perf_counter``.
        pending: Number of steps that they have.
    """

    calls: Calls
    executor: Executor
    most: int
    epoch: int
    copy_within: Callable[[int], int]
    stream: int = 0
    since: float = field(default_factory=time.perf_counter)
    pending: int = 0
    _handed: deque[tuple[int, Any]] = field(default_factory=deque)

    @classmethod
    def of(cls, loaded: LoadedRun, most: int, epoch: int, copy_within: Callable[[int], int]) -> StepsAhead:
        """Return what hands over the steps of a run; see the class for the other arguments.

        With servers, replicas do not learn of a refused step; tasks and streams are submitted as their step comes.
        """
        stream = loaded.schedule.stream
        alone = loaded.world.servers or loaded.run.executor == "tasks" or stream
        return cls(loaded.calls, executor_of(loaded), 0 if alone else most, epoch, copy_within, stream)

    def hand_over(self, first: int, stop: int) -> None:
        """Hand over as many steps as allowed.

        Args:
            first: Number of the step whose report comes next.
            stop: Number of the first step that must not be handed over yet.
        """
        if not self._handed:
            self.since = time.perf_counter()
        if self.stream:
            count = min(self.stream - first % self.stream, stop - first)
            begun = self.executor.begin(first, self.epoch, self.copy_within(first + count - 1), count)
            self._handed.append((first, begun))
            return
        for number in range(first + len(self._handed), min(stop, first + self.most + 1)):
            begun = self.executor.begin(number, self.epoch, self.copy_within(number))
            self._handed.append((number, begun))

    def collect(self) -> tuple[list[Any], float]:
        """Wait for the oldest step that was handed over.

        Returns:
            The results by rank, and the step's duration in seconds: since the step before it was collected, or since
            this one was handed over, but at least as long as the slowest actor took.

        Raises:
            NonFiniteError: The gradients are not finite. No later steps are left, because the actors refuse them.
            JobError: An actor failed. No later steps are left either.
            Exception: Other errors of ``Calls.gather``.
        """
        self.pending = len(self._handed)
        number, begun = self._handed.popleft()
        try:
            results = self.executor.results(begun, f"step {number + 1}")
        except JobError:
            self.drop()
            raise
        except NonFiniteError:
            while self._handed:
                self.executor.drop(self._handed.popleft()[1])
            raise
        before, self.since = self.since, time.perf_counter()
        seconds = max([self.since - before, *[result.end - result.start for result in results]])
        self.calls.deadline.learn(seconds)
        return results, seconds

    def drop(self) -> None:
        """Forget the steps that were handed over: after a failure the actors refuse them."""
        self._handed.clear()

    def __len__(self) -> int:
        return len(self._handed)
