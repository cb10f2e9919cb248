"""Errors that the driver raises."""

from __future__ import annotations

from raypar.actors.errors import FaultsError

TO_GO_ON = "To go on, "  # how a note of a job's error begins that says how Python goes on; commands say their own


class ConfigError(FaultsError, ValueError):
    """The user's mistakes in a run. Lists all of them, each with its fix. Raised before any actor starts.

    Attributes:
        faults: One sentence per mistake.
    """


class UnknownNameError(KeyError):
    """A name that a job does not have. The text says what it has."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError's own text is a repr, with quotes around it


class JobError(RuntimeError):
    """The run cannot continue. The text names the actor, its action and the cause. The job's actors have ended."""


class ActorDiedError(JobError):
    """An actor's process or node died."""


class StalledError(JobError):
    """An actor made no progress for the run's timeout."""


class NoRoomError(JobError):
    """No node has room for another actor in the place of one that is lost."""
