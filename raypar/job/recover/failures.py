"""The failures that a run has survived, and the limit at which one ends it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from raypar.errors import ActorDiedError, Death, JobError, PreemptedError, RayLostError

_SAME = 3  # failures with the same reason in one step after which another try would not help


@dataclass(frozen=True)
class Failure:
    """A failure that a run has survived, or that has ended it.

    Attributes:
        step: The step under way, counted from 1.
        reason: What failed, in one line.
        replaced: The actors that were replaced, by name.
        back_to: Number of steps taken before the point to which the run went back, or to which it goes if it is resumed
            after its end.
        source: The source of the restored state: "memory", or the name of a checkpoint; "" if the run begins anew.
        seconds: Seconds from the detection of the failure until all actors could go on.
        lost: Seconds of the recovery, of the step under way before it, and of the steps that are taken again.
        death: The known facts about the actor's death; None if no process died.
        is_end: Whether it has ended the run.
        size: The number of replicas with which the run goes on, in words, if fewer than before; else "".
    """

    step: int
    reason: str
    replaced: tuple[str, ...]
    back_to: int
    source: str
    seconds: float
    lost: float = 0.0
    death: Death | None = None
    is_end: bool = False
    size: str = ""

    def __str__(self) -> str:
        if self.is_end:
            return f"the run has ended: {self.reason}"
        who = f", with {' and '.join(self.replaced)} replaced" if self.replaced else ""
        who = f", with {self.size}" if self.size else who
        after = f"after step {self.back_to} (from {self.source})" if self.back_to else "from the start"
        return f"the run goes on {after}{who}, {self.seconds:.1f} s after the failure"

    @classmethod
    def ending(cls, step: int, error: JobError, back_to: int, source: str, lost: float) -> Failure:
        """Return the failure that has ended a run in a step, counted from 1.

        Args:
            step: The step.
            error: The error.
            back_to: Number of steps taken that a resumed run goes on after.
            source: The checkpoint that it begins with; "" if there is none.
            lost: Seconds that the failure has cost, if the run is resumed from there.
        """
        return cls(step, failure_reason(error), (), back_to, source, 0.0, lost, death_in(error), is_end=True)


class Failures:
    """Counts the failures of a run.

    Args:
        most: Number of failures that the run may survive.

    Attributes:
        survived: The failures that it has survived.
    """

    def __init__(self, most: int) -> None:
        self.survived: list[Failure] = []
        self._most, self._count = most, 0
        self._same = Counter[tuple[int, str]]()

    def count(self, step: int, error: JobError, *, is_foreseen: bool = False) -> None:
        """Count a failure, unless it is the end of a node that was drained with notice.

        Args:
            step: The step under way, counted from 1.
            error: The error.
            is_foreseen: Whether there was a drain notice for the node of the failed actor.

        Raises:
            JobError: The same error, if it ends the run; with a note on the reason, if the limit is reached.
        """
        if isinstance(error, PreemptedError | RayLostError):
            raise error
        death = death_in(error)
        if self._most and (is_foreseen or (death is not None and death.is_preempted)):
            return
        self._count += 1
        reason = failure_reason(error)
        self._same[step, reason] += 1
        if self._count > self._most:
            if self._most:
                error.add_note(f"It was failure {self._count}, and max_failures is {self._most}.")
            raise error
        if self._same[step, reason] >= _SAME:
            error.add_note(f"The same happened {_SAME} times in step {step}, so another try would not help.")
            raise error


def death_in(error: JobError) -> Death | None:
    """Return the known facts about the death that an error reports; None if it reports none."""
    return error.death if isinstance(error, ActorDiedError) else None


def failure_line(error: JobError) -> str:
    """Return the failure in one line, for a process that died with the cause."""
    if (death := death_in(error)) is None:
        return failure_reason(error)
    why = str(death).partition(" Its log, ")[0].removesuffix(".")
    return f"{failure_reason(error)}: {why[0].lower()}{why[1:]}"


def failure_reason(error: JobError) -> str:
    """Return the failure in one line, without the errors of other actors, which vary from time to time."""
    return str(error).partition("\n")[0].partition("; seen from")[0]
