"""The check of a run before its launch: all faults of the run on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.config.fields import FieldFault, field_faults, right_fields
from raypar.config.run import check_run
from raypar.config.schedule import Programs
from raypar.config.validate.system import recovery_faults
from raypar.errors import ConfigError
from raypar.planner.resource_needs import memory_faults


def check_launch(
    run: Run,
    resumed: Path | None = None,
    skeleton: Skeleton | None = None,
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
        skeleton: Skeleton of the run's model, if the caller has one already.
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
    skeleton = Skeleton(run.model, run.seed) if skeleton is None else skeleton
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
    if faults := [*trial_faults(run, skeleton, programs["train"].num_stages)]:
        raise ConfigError(faults)
    return programs


def trial_faults(run: Run, skeleton: Skeleton, num_stages: int) -> Iterator[str]:
    """Yield why model and data can't be sent to actors, or why the layers do not fit the data and each other.

    Args:
        run: The run, checked.
        skeleton: Its model without weights.
        num_stages: Number of stages.
    """
    if not isinstance(run.model, Layers) and not isinstance(run.data, Batches):
        return  # plain data
    from raypar.cluster.lifecycle.ray_cluster import pickled_copies  # imports Ray

    try:
        model, data = pickled_copies((run.model, run.data))
    except ConfigError as error:
        yield from error.faults
        return
    trial, faults = replace(run, model=model, data=data), list[str]()
    if isinstance(model, Layers) and skeleton.model.is_deferred:
        from raypar.config.trial.layers import layer_faults  # imports torch

        faults = layer_faults(trial, Skeleton(model, run.seed), num_stages)
    if isinstance(model, Layers) and not faults and (model.count is not None or model.metrics):
        from raypar.config.trial.loss import count_faults, metric_faults  # imports torch

        twin = Skeleton(model, run.seed)
        faults = [*count_faults(trial, twin), *metric_faults(trial, twin)]
    if not isinstance(model, Layers):
        from raypar.config.trial.tokens import token_faults  # imports torch

        faults = [*token_faults(replace(run, data=data))]
    yield from faults
