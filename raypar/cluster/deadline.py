"""How long an actor may stay in one action, or be silent, before it is given up."""

from __future__ import annotations

from collections import deque

SILENT = 2.5  # seconds without an answer to a ping, after which an actor is not waited for; a GIL may be held for 2 s
_LATE = 0.6  # seconds over the timeout in which an actor that waits for another one can time out, and name that one
_LOST = 10.0  # least seconds of silence after which an actor is replaced
_FLOOR = 30.0  # least seconds that an action may take before its actor is replaced
_TIMES = 10.0  # how many times as long as the longest of the last steps an action may take
_STEPS = 100  # number of steps of which that is


class Deadline:
    """The deadlines of a job's actors. Where failures end the job, only the run's timeout counts.

    Where a run survives failures, less patience costs less: an actor that hangs is replaced once an action takes many
    times as long as the last steps took, or once it gives no answer for some seconds.

    Args:
        timeout: How long an actor may stay in one action, in seconds.
        replaces: Whether another actor takes the place of one that is given up.
    """

    def __init__(self, timeout: float, *, replaces: bool = False) -> None:
        self._timeout, self._replaces = timeout, replaces
        self._steps = deque[float](maxlen=_STEPS)

    def learn(self, seconds: float) -> None:
        """Note how long a step took."""
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
