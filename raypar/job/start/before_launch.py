"""What a launch and a reset look at in a checked run, before actors get it."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike

from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind
from raypar.checkpoint.find import VerifiedCheckpoint
from raypar.checkpoint.resume import Prepared, prepared
from raypar.cluster.ray_cluster import pickled_copies
from raypar.config.arguments import checked_arguments
from raypar.config.layer_warnings import warn_of_layers
from raypar.config.run import check_run, reset_faults
from raypar.config.schedule import Programs
from raypar.config.validate.recovery import recovery_faults
from raypar.errors import ConfigError
from raypar.job.start.batch_checks import warn_of_batches
from raypar.planner.resource_needs import memory_faults


def look_ahead(run: Run, programs: Programs, skeleton: Skeleton) -> None:
    """Refuse what would go wrong in the first step, and log warnings of what would go wrong unnoticed.

    Args:
        run: The run, checked.
        programs: Its programs.
        skeleton: Its model without weights.

    Raises:
        ConfigError: The model or the data can't be sent to actors, or the layers do not fit the data and each other.
    """
    demand_fitting(run, skeleton, programs["train"].num_stages)
    warn_of_batches(run)
    _warn_of_first_batches(run)
    warn_of_layers(run, skeleton, programs["train"])


def demand_fitting(run: Run, skeleton: Skeleton, num_stages: int) -> None:
    """Check that model and data can be sent to actors, and that the layers fit the data and each other.

    Args:
        run: The run, checked.
        skeleton: Its model without weights.
        num_stages: Number of stages.

    Raises:
        ConfigError: They can't, or do not.
    """
    model, data = pickled_copies((run.model, run.data))
    if isinstance(model, Layers) and skeleton.model.is_deferred:
        from raypar.config.layer_trial import layer_faults

        if wrong := layer_faults(replace(run, model=model, data=data), Skeleton(model, run.seed), num_stages):
            raise ConfigError(wrong)
    if isinstance(model, Layers) and (model.count is not None or model.metrics):
        from raypar.config.loss_trial import count_faults, metric_faults

        trial, twin = replace(run, model=model, data=data), Skeleton(model, run.seed)
        if wrong := [*count_faults(trial, twin), *metric_faults(trial, twin)]:
            raise ConfigError(wrong)
    if isinstance(data, Batches) and not isinstance(model, Layers):
        from raypar.config.token_trial import token_faults

        if wrong := token_faults(replace(run, data=data)):
            raise ConfigError(wrong)


def _warn_of_first_batches(run: Run) -> None:
    """Log warnings of what the user's layers and loss do with the first batches."""
    if isinstance(run.model, Layers):
        from raypar.config.attribute_trial import warn_of_attributes
        from raypar.config.loss_trial import warn_of_loss

        model, data = pickled_copies((run.model, run.data))
        trial, skeleton = replace(run, model=model, data=data), Skeleton(model, run.seed)
        warn_of_attributes(trial, skeleton)  # before another call of the layers, which may change some for good
        warn_of_loss(trial, skeleton)


def replacement(
    run: Run, resume: str | PathLike[str] | VerifiedCheckpoint | None, before: Run, device: DeviceKind
) -> Prepared:
    """Check a run that replaces another one, as ``prepared`` does, and that it can start on the same actors.

    Args:
        run: The run.
        resume: Checkpoint to continue from; None for a new run.
        before: The run that it replaces.
        device: Device on which they compute.

    Raises:
        ConfigError: The run has faults.
    """
    begun = prepared(run, resume)
    if faults := [
        *reset_faults(begun.run, device, before.resources),
        *memory_faults(begun.run, begun.programs["train"], begun.skeleton, replaces=True),
    ]:
        raise ConfigError(faults)
    look_ahead(begun.run, begun.programs, begun.skeleton)
    return begun


@checked_arguments
def faults(run: Run) -> list[str]:
    """Return all faults of a run, each with its fix; [] if it can be launched. Nothing is started, and nothing raised.

    Args:
        run: The run.
    """
    skeleton = Skeleton(run.model, run.seed)
    try:
        programs = check_run(run, skeleton=skeleton)
        demand_fitting(run, skeleton, programs["train"].num_stages)
    except ConfigError as error:
        return [*error.faults, *recovery_faults(run.max_failures)]
    return list(recovery_faults(run.max_failures))
