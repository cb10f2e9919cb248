"""The check of a run before its launch: all faults of the run on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Layers, Transformer
from raypar.actors.specs.run import Run
from raypar.config.conflicts.system import recovery_faults
from raypar.config.fields import FieldFault, field_faults, right_fields
from raypar.config.run import check_run
from raypar.config.schedule import Programs
from raypar.errors import ConfigError
from raypar.planner.resource_needs import memory_faults


@dataclass(frozen=True)
class TrialRun:
    """A run whose layers, loss and data may be called on the driver: they are copies, as actors get them.

    Attributes:
        run: The run.
        skeleton: Its model without weights. The user's function is called once for it.
        faults: Why there are no copies; the run and its skeleton are the user's own then, and nothing may be called.
    """

    run: Run
    skeleton: Skeleton
    faults: Sequence[str] = ()

    @classmethod
    def of(cls, run: Run, skeleton: Skeleton | None = None) -> Self:
        """Copy the model and data of a run if they have functions of the user's.

        Args:
            run: The run.
            skeleton: The skeleton of its model, if the caller has one already.
        """
        if not isinstance(run.model, Layers) and not isinstance(run.data, Batches):
            return cls(run, skeleton or Skeleton(run.model, run.seed))
        from raypar.cluster.lifecycle.ray_cluster import pickled_copies  # imports Ray

        faults: Sequence[str] = ()
        try:
            model, data = pickled_copies((run.model, run.data))
            run = replace(run, model=model, data=data)
        except ConfigError as error:
            faults = error.faults
        return cls(run, skeleton or Skeleton(run.model, run.seed), faults)


def check_launch(
    run: Run,
    resumed: Path | None = None,
    trial: TrialRun | None = None,
    *,
    overwrite: bool = False,
    wrong: Sequence[FieldFault] = (),
    replaces: bool = False,
    convert: Callable[[Run], None] = lambda _: None,
    others: Sequence[str] = (),
    here: bool = True,
) -> Programs:
    """Check a run as ``check_run`` does, and that its actors can start with the memory, data, model and system here.

    Args:
        run: The run.
        resumed: The checkpoint to continue from.
        trial: Copies of the run's model and data, if the caller has them already.
        overwrite: Whether the run may replace one that is in its folder.
        wrong: Faults that were found where the run was read.
        replaces: Whether another run on this machine ends first, with what it has in memory and on the disk.
        convert: Converts the run's data; called once, for a run without faults so far.
        others: Further faults, which the caller has found.
        here: Whether the run is to begin on this system; a plan may be for another one.

    Returns:
        The programs of the run.

    Raises:
        ConfigError: The run has faults. The error lists all of them.
    """
    trial = TrialRun.of(run) if trial is None else trial
    skeleton = trial.skeleton
    is_sound = right_fields([*wrong, *field_faults(run)])("max_failures")
    lacking = [*others, *(recovery_faults(run.max_failures) if here and is_sound else ())]

    def before_data(programs: Programs) -> None:
        """Raise ConfigError if the run does not fit this machine; else convert its data."""
        memory = memory_faults(run, programs["train"], skeleton, replaces=replaces) if here else ()
        if faults := [*lacking, *memory]:
            raise ConfigError(faults)
        convert(run)

    try:
        programs = check_run(run, resumed, skeleton, overwrite=overwrite, wrong=wrong, before_data=before_data)
    except ConfigError as error:
        raise ConfigError([*error.faults, *(fault for fault in lacking if fault not in error.faults)]) from None
    if faults := [*trial.faults] or [*trial_faults(trial, programs["train"].num_stages)]:
        raise ConfigError(faults)
    return programs


def trial_faults(trial: TrialRun, num_stages: int) -> Iterator[str]:
    """Yield why the layers do not fit the data and each other, or why the loss or the tokens do not.

    Args:
        trial: The run, checked, which could be copied.
        num_stages: Number of stages.
    """
    run, skeleton, faults = trial.run, trial.skeleton, list[str]()
    if isinstance(run.model, Layers) and skeleton.model.is_deferred:
        from raypar.config.trial.layers import layer_faults  # imports torch

        faults = layer_faults(run, skeleton, num_stages)
    if isinstance(run.model, Layers) and not faults and (run.model.count is not None or run.model.metrics):
        from raypar.config.trial.loss import count_faults, metric_faults  # imports torch

        faults = [*count_faults(run, skeleton), *metric_faults(run, skeleton)]
    if isinstance(run.model, Transformer) and isinstance(run.data, Batches):
        from raypar.config.trial.tokens import token_faults  # imports torch

        faults = [*token_faults(run)]
    yield from faults
