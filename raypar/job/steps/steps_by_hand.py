"""The training step that is taken by hand, action by action."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from raypar.actors.specs.types import DeviceKind
from raypar.errors import JobError, StepLostError
from raypar.job.recover.failures import Failure
from raypar.job.start.loaded_run import LoadedRun
from raypar.job.stepping.stepper import Stepper
from raypar.reporting.report import Report


class StepsByHand:
    """Opens the steps of a job that are taken by hand, and knows whether one is under way.

    Args:
        device: Device that the actors compute on.
    """

    def __init__(self, device: DeviceKind) -> None:
        self._device = device
        self._stepper: Stepper | None = None

    def forget(self) -> None:
        """Forget the step under way: the job goes on with another run."""
        self._stepper = None

    @property
    def midway(self) -> Stepper | None:
        """The step under way, which has begun and is not over."""
        return self._stepper if self._stepper is not None and self._stepper.midway else None

    def begun(self) -> Stepper | None:
        """Return the step under way, if it has done an action."""
        return self.midway if self.midway is not None and self.midway.done else None

    def demand_over(self) -> None:
        """Give up a step that has done no action yet. Raises JobError in the middle of one."""
        if self.begun() is not None:
            raise JobError("job.stepper() is in the middle of this step: call its finish() or abort() first")
        if self.midway is not None:
            with suppress(StepLostError):
                self.midway.abort()  # nothing is lost

    def open(
        self,
        loaded: LoadedRun,
        step: int,
        guard: Callable[[Callable[[], list[Any]]], list[Any]],
        commit: Callable[[list[Any], float], Report],
    ) -> Stepper:
        """Return a Stepper for a training step of a run.

        Args:
            loaded: The run.
            step: Number of the step, from 0.
            guard: Calls the actors, and survives a failure or ends the job.
            commit: Counts the step when it is over, and returns its report.

        Raises:
            JobError: The run's schedule is asynchronous.
        """
        if loaded.schedule.stream:
            is_late = not loaded.schedule.validated
            kind = "is asynchronous, so that steps" if is_late else "has steps without a flush, which"
            fix = "need a synchronous one, as 1f1b" if is_late else "need a flush after each: leave flush_every out"
            raise JobError(f"schedule {loaded.schedule.name!r} {kind} overlap: steps by hand {fix}")
        self._stepper = Stepper(loaded, self._device, step, guard=guard, commit=commit)
        return self._stepper

    def lose(self, failure: Failure, step: int) -> StepLostError:
        """Return the error that the step under way is lost after a failure which the run has survived.

        Args:
            failure: The failure.
            step: Number of the step that comes next, from 0.
        """
        lost = StepLostError(f"{failure.reason}: {failure}; job.stepper() begins step {step + 1}")
        if self.midway is not None:
            self.midway.lose(lost)
        return lost
