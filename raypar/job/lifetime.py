"""Calls on a job's actors: they come to their end, or the job does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from raypar.actors.errors import NonFiniteError
from raypar.cluster.calls import Calls
from raypar.cluster.interrupts import CtrlC, patience
from raypar.cluster.ray_cluster import Actors
from raypar.errors import JobError

T = TypeVar("T")


class Guarded(ABC):
    """What has actors, until a fault or ``close`` ends it."""

    _actors: Actors | None
    _calls: Calls
    _failure: str | None  # why it is over
    _epoch: int  # how many steps could not be made by now

    @abstractmethod
    def close(self) -> None:
        """End the actors."""

    def _demand_open(self) -> None:
        """Raise JobError if the job is over."""
        if self._failure is None and (self._actors is None or not self._actors.reachable()):
            self._failure = "the Ray that its actors lived in was shut down"
        if self._failure is not None:
            raise JobError(f"this job is over ({self._failure}): launch the run again")

    def _guard(self, call: Callable[[], T], *, patient: bool = True) -> T:
        """Run a call on the actors; a fault ends the job, so that nothing is left waiting or running.

        With a patient call Ctrl-C waits for it, and only a second one ends the job. What the actors are told and what
        the driver then notes of it belong into one call: interrupted in between, they would not be in the same step.
        """
        self._demand_open()
        try:
            with patience("what they were told") if patient else nullcontext(CtrlC()) as ctrl_c:
                answer = call()
        except NonFiniteError:
            self._epoch += 1
            raise  # nobody has changed a weight: the job can go on
        except (KeyboardInterrupt, JobError) as error:
            if self._failure is None:  # else a call within this one has ended the job
                self._fail(error)
            raise
        ctrl_c.heed()
        return answer

    def _fail(self, error: KeyboardInterrupt | JobError) -> None:
        if isinstance(error, JobError):
            self._failure = str(error).splitlines()[0]
            self._calls.abort()
        else:  # the actors go on with what they were told: the same step once more would be taken twice
            self._failure = "it was interrupted while its actors worked"
        self.close()
