"""Refusal of calls after a call that has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raypar.actors.errors import NonFiniteError, StaleError


class Refusals:
    """Refuses calls after a failure: queued steps, and the remaining calls of the failed step.

    Attributes:
        has_failed: Whether a step has failed, so that later ones are refused. A non-finite step is no failure.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self._of_step: Exception | None = None  # the error of all further calls of the step

    def stop(self) -> None:
        """Refuse all steps after the present one."""
        self.has_failed = True

    def begin(self, label: str) -> None:
        """Begin a step. Raises StaleError if one before it has failed."""
        if self.has_failed:
            raise StaleError(f"{label} has failed in a step before this one")
        self._of_step = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Return a context for a call of the step. After a failure, all further calls of the step raise its error."""
        if self._of_step is not None:
            raise self._of_step.with_traceback(None)
        try:
            yield
        except Exception as error:
            self._of_step = error
            self.has_failed = not isinstance(error, NonFiniteError | StaleError)
            raise
