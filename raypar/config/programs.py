"""The programs of a run: its schedule in the run's sizes, with the skips of its layers and the passes of its fields."""

from __future__ import annotations

from collections.abc import Callable

from raypar.actors.models.partition import split_faults
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.config.conflicts.parallel import turn_faults
from raypar.config.schedule import (
    Programs,
    ZeroActions,
    programs_of,
    takes_costs,
    with_backward,
    with_offload,
    with_zero,
)
from raypar.planner.cost_model import costs_of_run, costs_with_halving
from raypar.schedules.passes.skip_connections import Skips, no_skips
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.simulate import Costs


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


def lowered_programs(
    run: Run,
    skeleton: Skeleton,
    schedule: str | Schedule | None = None,
    costs: Costs | None = None,
    *,
    counts_replicas: bool = True,
) -> Programs:
    """Return the programs of a schedule in the sizes of a run, without splitting backwards.

    Args:
        run: The run.
        skeleton: Its model without weights.
        schedule: The schedule; None for the run's.
        costs: How long actions last, for a schedule that depends on it; None for its default.
        counts_replicas: Whether the fields that decide whether replicas reduce gradients are valid.

    Raises:
        ScheduleError: The schedule does not fit the run, or breaks a rule.
    """
    return programs_of(
        run.schedule if schedule is None else schedule,
        run.mesh.pp,
        run.microbatches,
        run.chunks,
        steps=run.flush_every,
        reduce_grad=counts_replicas and zero_actions_of(run).reduce == "step",
        costs=costs,
        replicas=() if any(turn_faults(run)) else run.mesh.rank_dp,
        skips=skips_of(run, skeleton),
        slices=run.token_slices,
    )


def finished_programs(run: Run, skeleton: Skeleton, programs: Programs) -> Programs:
    """Return the programs of a sound run as actors perform them: with split backwards, ZeRO and offloading.

    A schedule that depends on costs is generated again with the costs of the run.

    Args:
        run: The run.
        skeleton: Its model without weights.
        programs: Its lowered programs.
    """
    if takes_costs(run.schedule):
        costs = costs_of_run(run, programs["train"].num_stages)
        programs = lowered_programs(run, skeleton, costs=costs)
    whole = with_zero(_with_backward(run, programs), zero_actions_of(run))
    return with_offload(whole, run.activations_on_device)


def _with_backward(run: Run, programs: Programs) -> Programs:
    """Return the programs with backwards split as the run says."""
    if run.backward == "auto" and isinstance(run.model, Layers) and not run.model.halves:
        return programs
    weighed = costs_of_run if run.backward == "split" else costs_with_halving  # where all are split, nothing is weighed
    costs = weighed(run, programs["train"].num_stages)
    # What a layer keeps for a later W is as large as all its activations, which recomputation is meant to spare.
    return with_backward(programs, run.backward, costs, hold=run.recompute == "none")


def zero_actions_of(run: Run) -> ZeroActions:
    """Return when the replicas of a run reduce gradients and gather weights."""
    world = world_of(run)
    each = world.zero > 1 or (world.replicas == 1 and world.frees_buckets)
    return ZeroActions(
        reduce=(run.zero_reduce or ("microbatch" if each else "step")) if world.reduces else None,
        gather=run.zero_gather if world.unshards else None,
        reshard_after_forward=run.reshard_after_forward,
        resident=run.zero_resident if run.zero_gather == "step" else None,
    )


def lowered_step(run: Run, schedule: str | Schedule) -> Schedule:
    """Lower a schedule for a training step of a run, without splitting backwards. Raises ScheduleError."""
    return with_zero(lowered_programs(run, Skeleton(run.model, run.seed), schedule), zero_actions_of(run))["train"]
