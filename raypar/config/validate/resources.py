"""Check what a run's actors take of their nodes against its other fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raypar.actors.specs.run import Run


def resource_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield what is wrong with a run's resources, each with its fix.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
    """
    if right("resources"):
        yield from run.resources.faults()
    if right("resources", "device") and run.resources.gpus is not None and run.device == "cpu":
        yield f"resources.gpus is {run.resources.gpus:g}, but device is 'cpu': leave one of them out"
