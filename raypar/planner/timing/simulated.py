"""A step on paper by simulation: its schedule, with gathers and reductions beside actions, performed at its costs."""

from __future__ import annotations

from raypar.actors.specs.run import Run
from raypar.planner.timing.step import StepModel
from raypar.schedules.action import Op
from raypar.schedules.catalog import build
from raypar.schedules.passes.gather_weights import gather_weights
from raypar.schedules.passes.reduce_gradients import ReduceWhen, reduce_gradients
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.simulate import Costs, outcome

_ROUNDS = 3  # of p microbatches, after which every further one takes as long


def simulated(paper: StepModel) -> float:
    """Return the seconds of a step by simulation.

    After some rounds of p microbatches a pipeline is in its steady state, so two short steps predict a long one.

    Args:
        paper: The run on paper. Its schedule is one by name.
    """
    ranks, m = paper.run.mesh.pp, paper.run.microbatches
    rest = m % ranks
    short, longer = (rounds * ranks + rest for rounds in (_ROUNDS, _ROUNDS + 1))
    if m <= longer:
        return _makespan(paper, m)
    before, after = _makespan(paper, short), _makespan(paper, longer)
    return after + (m - longer) * (after - before) / ranks


def most_simulated(run: Run) -> int:
    """Return how many actions of compute are simulated of a step at the most: of a long one those of some rounds."""
    return 2 * min(run.microbatches, (_ROUNDS + 2) * run.mesh.pp) * run.mesh.pp * (run.chunks or 1)


def _makespan(paper: StepModel, microbatches: int) -> float:
    """Return the seconds of a step of so many microbatches, the update included."""
    return outcome(schedule_of(paper, microbatches), costs_on(paper)).makespan + paper.slowest_update


def schedule_of(paper: StepModel, microbatches: int) -> Schedule:
    """Return the schedule of a step of so many microbatches, with gathers and reductions where the run has them."""
    run, world = paper.run, paper.world
    assert isinstance(run.schedule, str)
    schedule = build(run.schedule, run.mesh.pp, microbatches, run.chunks)
    if world.reduces:
        schedule = reduce_gradients(schedule, _reduced(run, frees_buckets=world.frees_buckets))
    if world.gathers:
        schedule = gather_weights(schedule, run.zero_gather, reshard_after_forward=run.reshard_after_forward)
    return schedule


def costs_on(paper: StepModel) -> Costs:
    """Return the seconds of the actions of a run on paper; its schedule has no STEP, which comes after all others."""
    of_stage: dict[tuple[int, Op], float] = {}
    for stage, each in enumerate(paper.stages):
        gather, reduction = paper.exchanged(stage)
        ops = {Op.F: each.f, Op.B: each.b, Op.I: each.b - each.weights, Op.W: each.weights}
        of_stage |= {
            (stage, op): seconds for op, seconds in (ops | {Op.UNSHARD: gather, Op.REDUCE_GRAD: reduction}).items()
        }
    return Costs(
        of_stage=of_stage,
        link=paper.border,
        reduce_beside=paper.hides,
        units=min(held.units for held in paper.held),
    )


def _reduced(run: Run, *, frees_buckets: bool) -> ReduceWhen:
    """Return how often a run reduces gradients."""
    return run.zero_reduce or ("microbatch" if frees_buckets else "step")
