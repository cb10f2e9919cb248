"""What a launch and a reset look at in a checked run, before actors get it."""

from __future__ import annotations

from dataclasses import replace

from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.cluster.ray_cluster import shipped
from raypar.config.arguments import checked_arguments
from raypar.config.layer_warnings import warn_of_layers
from raypar.config.run import check_run
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
    demand_fitting(run, skeleton)
    warn_of_batches(run)
    warn_of_layers(run, skeleton, programs["train"])


def demand_fitting(run: Run, skeleton: Skeleton) -> None:
    """Check that model and data can be sent to actors, and that the layers fit the data and each other.

    Args:
        run: The run, checked.
        skeleton: Its model without weights.

    Raises:
        ConfigError: They can't, or do not.
    """
    model, data = shipped((run.model, run.data))
    if isinstance(model, Layers) and skeleton.model.is_deferred:
        from raypar.config.layer_trial import layer_faults

        if wrong := layer_faults(replace(run, model=model, data=data), Skeleton(model, run.seed)):
            raise ConfigError(wrong)
    if isinstance(data, Batches) and not isinstance(model, Layers):
        from raypar.config.token_trial import token_faults

        if wrong := token_faults(replace(run, data=data)):
            raise ConfigError(wrong)


@checked_arguments
def faults(run: Run) -> list[str]:
    """Return all faults of a run, each with its fix; [] if it can be launched. Nothing is started, and nothing raised.

    Args:
        run: The run.
    """
    skeleton = Skeleton(run.model, run.seed)
    try:
        check_run(run, skeleton=skeleton)
        demand_fitting(run, skeleton)
    except ConfigError as error:
        return error.faults
    return []
