"""The life of a job's actors: calls on them come to their end, or the job does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from raypar.actors.errors import NonFiniteError
from raypar.actors.mesh.world import World
from raypar.cluster.calls import Calls
from raypar.cluster.interrupts import CtrlC, patience
from raypar.cluster.ray_cluster import Actors
from raypar.errors import JobError

T = TypeVar("T")


class Lifetime:
    """A job's actors, until a fault or the job's ``close`` ends them.

    failure  why the job is over; None while it goes on
    epoch    how many steps could not be made by now
    """

    def __init__(self, actors: Actors, close: Callable[[], None]) -> None:
        """``close`` closes the job; a fault calls it, and it calls ``end``."""
        self.failure: str | None = None
        self.epoch = 0
        self._actors: Actors | None = actors
        self._calls: Calls | None = None
        self._close = close

    def handles(self, count: int) -> list[Any]:
        """The handles of the first ``count`` actors. Raises JobError if the job is over."""
        self.demand_open()
        assert self._actors is not None
        return self._actors.handles[:count]

    def calls_on(self, world: World, timeout: float) -> Calls:
        """Calls on the actors of a world, which a fault breaks off from now on. Raises JobError if the job is over."""
        self._calls = Calls(self.handles(world.size), world, timeout)
        return self._calls

    def demand_open(self) -> None:
        """Raise JobError if the job is over."""
        if self.failure is None and (self._actors is None or not self._actors.reachable()):
            self.failure = "the Ray that its actors lived in was shut down"
        if self.failure is not None:
            raise JobError(f"this job is over ({self.failure}): launch the run again")

    def guard(self, call: Callable[[], T], *, patient: bool = True) -> T:
        """Run a call on the actors; a fault ends the job, so that nothing is left waiting or running.

        With a patient call Ctrl-C waits for it, and only a second one ends the job. What the actors are told and what
        the driver then notes of it belong into one call: interrupted in between, they would not be in the same step.

        Args:
            call: asks the actors, and notes their answers
            patient: whether Ctrl-C waits for the call

        Returns:
            What the call returns.

        Raises:
            JobError: if the job is over, or with the fault that has ended it
            NonFiniteError: if no actor has made the step; the job can go on
            KeyboardInterrupt: after the call if Ctrl-C was pressed in it; else the job has ended
        """
        self.demand_open()
        try:
            with patience("what they were told") if patient else nullcontext(CtrlC()) as ctrl_c:
                answer = call()
        except NonFiniteError:
            self.epoch += 1
            raise  # nobody has changed a weight: the job can go on
        except (KeyboardInterrupt, JobError) as error:
            if self.failure is None:  # else a call within this one has ended the job
                self._fail(error)
            raise
        ctrl_c.heed()
        return answer

    def end(self, let_go: Callable[[bool], None]) -> None:
        """End the actors, and Ray if the launch started it. More than once does no harm.

        Args:
            let_go: ends what the run has begun beside its actors; called first, with whether the job has failed
        """
        if self._actors is None:
            return
        (actors, self._actors), failure = (self._actors, None), self.failure
        self.failure = failure or "the job was closed"
        try:
            let_go(failure is not None)
        finally:
            actors.end()

    def _fail(self, error: KeyboardInterrupt | JobError) -> None:
        if isinstance(error, JobError):
            self.failure = str(error).splitlines()[0]
            if self._calls is not None:
                self._calls.abort()
        else:  # the actors go on with what they were told: the same step once more would be taken twice
            self.failure = "it was interrupted while its actors worked"
        self._close()
