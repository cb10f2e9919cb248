"""What a launch and a reset look at in a checked run, before actors get it."""

from __future__ import annotations

from dataclasses import replace

from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.cluster.ray_cluster import shipped
from raypar.config.layer_warnings import warn_of_layers
from raypar.config.schedule import Programs
from raypar.config.skeleton import Skeleton
from raypar.errors import ConfigError
from raypar.job.batch_checks import warn_of_batches


def look_ahead(run: Run, programs: Programs, skeleton: Skeleton) -> None:
    """Refuse what would go wrong in the first step, and log warnings of what would go wrong unnoticed.

    Args:
        run: The run, checked.
        programs: Its programs.
        skeleton: Its model without weights.

    Raises:
        ConfigError: The model or the data can't be sent to actors, or the layers do not fit the data and each other.
    """
    model, data = shipped((run.model, run.data))
    if isinstance(model, Layers) and skeleton.model.is_deferred:
        from raypar.config.layer_trial import layer_faults

        if faults := layer_faults(replace(run, model=model, data=data), Skeleton(model, run.seed)):
            raise ConfigError(faults)
    warn_of_batches(run)
    warn_of_layers(run, skeleton, programs["train"])
