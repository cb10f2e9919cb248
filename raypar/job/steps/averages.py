"""Calls to actors that compute with the moving averages of their weights for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from raypar.actors.specs.run import Run
from raypar.cluster.calls import Calls
from raypar.errors import ConfigError, JobError
from raypar.job.start.loaded_run import LoadedRun

T = TypeVar("T")


def demand_averages(run: Run) -> None:
    """Raise ConfigError if a run keeps no averages of its weights."""
    if run.ema is None:
        raise ConfigError(["ema is True, but the run keeps no averages of its weights: give Run(ema=0.999), say"])


def use_averages(calls: Calls, *, use: bool) -> None:
    """Let the weights of actors have their averages' values, or again their own."""
    calls.all("use_averages", use, what="averages of weights")


def with_averages(calls: Calls, call: Callable[[], T]) -> T:
    """Call a function while the actors compute with the averages of their weights.

    Args:
        calls: Calls to the actors.
        call: The function. After a JobError of it the actors are over, or load a snapshot, and so nothing is done.
    """
    use_averages(calls, use=True)
    try:
        answer = call()
    except JobError:
        raise
    except Exception:
        use_averages(calls, use=False)
        raise
    use_averages(calls, use=False)
    return answer


def evaluation_step(loaded: LoadedRun, number: int, *, ema: bool) -> list[Any]:
    """Have the actors take an evaluation step.

    Args:
        loaded: The run.
        number: The number of the step, from 0.
        ema: Whether they compute with the averages of their weights.
    """

    def take() -> list[Any]:
        return loaded.calls.all("run", "evaluate", number, what=f"evaluation step {number + 1}")

    return with_averages(loaded.calls, take) if ema else take()
