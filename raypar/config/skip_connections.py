"""The skips of a run's layers as skips between the stages of its schedule."""

from __future__ import annotations

from collections.abc import Callable

from raypar.actors.models.partition import split_faults
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.schedules.passes.skip_connections import Skips, no_skips


def skips_of(run: Run, skeleton: Skeleton) -> Callable[[int], Skips]:
    """Return a function from the number of stages to the skips between them: none if model or split have faults.

    Args:
        run: The run.
        skeleton: Its model without weights.
    """
    if not isinstance(run.model, Layers) or not run.model.skips:
        return no_skips

    def between(num_stages: int) -> Skips:
        from raypar.actors.models.skip_connections import skip_faults, skips_between  # imports torch

        try:
            model = skeleton.model
        except Exception:  # the check of the layers reports it
            return ()
        count = len(model.names)
        if any(skip_faults(model.skips, count)) or split_faults(run.split, count, num_stages):
            return ()
        return skips_between(model.skips, model.stages(run.split, num_stages))

    return between
