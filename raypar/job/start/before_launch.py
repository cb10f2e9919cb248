"""Warnings about a checked run before its launch, and the checks of a run that replaces another one."""

from __future__ import annotations

from os import PathLike

from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind
from raypar.checkpoint.find import VerifiedCheckpoint
from raypar.config.arguments import checked_arguments
from raypar.config.run import reset_faults
from raypar.config.trial.silent_faults import warn_of_layers
from raypar.errors import ConfigError
from raypar.job.start.batch_checks import warn_of_batches
from raypar.job.start.launchable import check_launch
from raypar.job.start.resume import Prepared, prepared


def look_ahead(checked: Prepared) -> None:
    """Log warnings of mistakes in a checked run that no error reports."""
    warn_of_batches(checked.run)
    if isinstance(checked.run.model, Layers):
        from raypar.config.trial.loss import warn_of_loss
        from raypar.config.trial.silent_faults import warn_of_attributes

        warn_of_attributes(checked.trial.run, checked.skeleton)
        warn_of_loss(checked.trial.run, checked.skeleton)
    warn_of_layers(checked.run, checked.skeleton, checked.programs["train"])


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
    checked = prepared(run, resume, replaces=True, besides=lambda run: reset_faults(run, device, before))
    look_ahead(checked)
    return checked


@checked_arguments
def faults(run: Run) -> list[str]:
    """Return all faults of a run, each with its fix; [] if it can be launched. Nothing is started, and nothing raised.

    Args:
        run: The run.
    """
    try:
        check_launch(run)
    except ConfigError as error:
        return [*error.faults]
    return []
