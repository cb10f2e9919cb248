"""What a running job raises."""

from __future__ import annotations

from raypar.actors.errors import FaultsError


class ConfigError(FaultsError, ValueError):
    """A user's mistakes, all of them, each with its fix; raised before any actor starts."""


class JobError(RuntimeError):
    """A run that can't go on; the text names the actor, what it did and why. The job's actors are gone."""


class ActorDiedError(JobError):
    """An actor's process or node is gone."""


class StalledError(JobError):
    """An actor made no progress within the run's timeout."""
