"""The failures that a run has survived, and when one is too many."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from raypar.errors import ActorDiedError, Death, JobError, PreemptedError, RayLostError

_SAME = 3  # times that the same fault may happen in one step: it is then no accident


@dataclass(frozen=True)
class Failure:
    """A failure that a run has survived, or that has ended it.

    Attributes:
        step: The step under way, counted from 1.
        reason: What failed, in one line.
        replaced: The actors that were replaced, by name.
        back_to: Number of steps taken before the point that the run went back to.
        source: Where the state came from: "memory", or the name of a checkpoint; "" if the run began anew.
        seconds: How long it took from the failure's being noticed until all actors could go on.
        lost: Seconds that it has cost: those, those of the step under way until then, and those of the steps that are
            taken again.
        death: What is known of the actor's death; None if no process died.
        is_end: Whether it has ended the run.
        size: With how many replicas it goes on, if these are fewer than before; else "".
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

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, for the run folder."""
        return asdict(self)

    @classmethod
    def ending(cls, step: int, error: JobError, lost: float) -> Failure:
        """Return the failure that has ended a run in a step, counted from 1, and cost so many seconds until then."""
        return cls(step, failure_reason(error), (), step - 1, "", 0.0, lost, death_in(error), is_end=True)


class Failures:
    """Counts the failures of a run.

    Args:
        most: How many the run may survive.

    Attributes:
        survived: Those that it has survived.
    """

    def __init__(self, most: int) -> None:
        self.survived: list[Failure] = []
        self._most, self._count = most, 0
        self._same = Counter[tuple[int, str]]()

    def count(self, step: int, error: JobError, *, is_foreseen: bool = False) -> None:
        """Count a failure, unless it is the end of a node that was taken away with notice.

        Args:
            step: The step under way, counted from 1.
            error: What failed.
            is_foreseen: Whether there was a notice that the node of the actor that failed is taken away.

        Raises:
            JobError: The same error, if it ends the run; with a note that says why, if it is one too many.
        """
        if isinstance(error, PreemptedError | RayLostError):
            raise error
        death = death_in(error)
        if self._most and (is_foreseen or (death is not None and death.is_preempted)):
            return
        self._count += 1
        what = failure_reason(error)
        self._same[step, what] += 1
        if self._count > self._most:
            if self._most:
                error.add_note(f"It was failure {self._count}, and max_failures is {self._most}.")
            raise error
        if self._same[step, what] >= _SAME:
            error.add_note(f"The same happened {_SAME} times in step {step}, so another try would not help.")
            raise error


def death_in(error: JobError) -> Death | None:
    """Return what is known of the death that an error tells of; None if it tells of none."""
    return error.death if isinstance(error, ActorDiedError) else None


def failure_line(error: JobError) -> str:
    """Return in one line what failed and, of a process that died, why."""
    if (death := death_in(error)) is None:
        return failure_reason(error)
    why = str(death).partition(" Its log, ")[0].removesuffix(".")
    return f"{failure_reason(error)}: {why[0].lower()}{why[1:]}"


def failure_reason(error: JobError) -> str:
    """Return what failed in one line, without what others saw of it, which differs from time to time."""
    return str(error).partition("\n")[0].partition("; seen from")[0]
