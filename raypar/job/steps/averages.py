"""Calls to actors that compute with the moving averages of their weights for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raypar.actors.specs.run import Run
from raypar.cluster.calls.calls import Calls
from raypar.errors import ConfigError, JobError


def demand_averages(run: Run) -> None:
    """Raise ConfigError if a run keeps no averages of its weights."""
    if run.ema is None:
        raise ConfigError(["ema is True, but the run keeps no averages of its weights: give Run(ema=0.999), say"])


def use_averages(calls: Calls, *, use: bool) -> None:
    """Let the weights of actors have their averages' values, or again their own."""
    calls.all("use_averages", use, what="averages of weights")


@contextmanager
def with_averages(calls: Calls, *, ema: bool) -> Iterator[None]:
    """Let the actors compute with the averages of their weights in this context, if ``ema`` is true.

    After a JobError in it the actors are over, or load a snapshot, and so nothing is done.
    """
    if not ema:
        yield
        return
    use_averages(calls, use=True)
    try:
        yield
    except JobError:
        raise
    except Exception:
        use_averages(calls, use=False)
        raise
    use_averages(calls, use=False)
