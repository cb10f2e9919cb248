"""The limits of the time that an actor may stay in one action, or be silent, before it is given up."""

from __future__ import annotations

from collections import deque

SILENT = 2.5  # seconds without an answer after which an actor counts as silent; code may hold the GIL for 2 s
_LATE = 0.6  # seconds after the timeout within which an actor that waits for another one can time out, and name it
_LOST = 10.0  # least seconds of silence after which an actor is replaced
_FLOOR = 30.0  # least seconds that an action may take before its actor is replaced
_TIMES = 10.0  # the limit of an action, in multiples of the longest of the last steps
_STEPS = 100  # number of last steps that count


class Deadline:
    """The deadlines of a job's actors. If failures end the job, only the run's timeout counts.

    If a run survives failures, giving up early costs less: a hanging actor is replaced once an action takes many times
    as long as the last steps, or once it does not answer for some seconds.

    Args:
        timeout: Most seconds that an actor may stay in one action.
        replaces: Whether an actor that is given up is replaced.
    """

    def __init__(self, timeout: float, *, replaces: bool = False) -> None:
        self._timeout, self._replaces = timeout, replaces
        self._steps = deque[float](maxlen=_STEPS)

    def learn(self, seconds: float) -> None:
        """Record the duration of a step."""
        self._steps.append(seconds)

    @property
    def action(self) -> float:
        """Seconds that an action may take."""
        if not self._replaces or not self._steps:
            return self._timeout + _LATE
        return min(self._timeout + _LATE, max(_FLOOR, _TIMES * max(self._steps)))

    @property
    def silence(self) -> float:
        """Seconds that an actor may be silent."""
        return max(min(self._timeout + _LATE, _LOST) if self._replaces else self._timeout + _LATE, SILENT)
