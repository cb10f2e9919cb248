"""How long a training step of a run takes on a cluster on paper, and the parts of its time.

A step on paper by simulation: its schedule, with gathers and reductions beside actions, performed at its costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.planner.hardware.cluster import Cluster
from raypar.planner.memory.activations import loss_slice
from raypar.planner.memory.worker import element_bytes
from raypar.planner.sizes.parameters import StageParameters, held_by_stage
from raypar.planner.timing.messages import LADDER, RAYPAR, Order, ReplicaMessages, Software, messages_of, update_bytes
from raypar.planner.timing.roofline import Roofline
from raypar.planner.timing.stages import StageSeconds, stage_layers, stages_of, summed_times
from raypar.schedules.action import Op
from raypar.schedules.catalog import build
from raypar.schedules.float_sum import float_sum
from raypar.schedules.passes.gather_weights import gather_weights
from raypar.schedules.passes.reduce_gradients import ReduceWhen, reduce_gradients
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.simulate import Costs, outcome

_ROUNDS = 3  # of p microbatches, after which every further one takes as long


@dataclass(frozen=True)
class PredictedStep:
    """A predicted training step of one actor of the busiest pipeline rank.

    Attributes:
        layers: Seconds of forwards and backwards, without what is computed again and messages.
        again: Seconds of what backwards compute again.
        messages: Seconds of messages inside of layers: over tensor, context and expert ranks.
        borders: Seconds in which it waits for values that are on their way from another stage.
        bubble: Seconds in which the pipeline fills and empties.
        replicas: Seconds of gathers and reductions that no computing hides.
        update: Seconds of the optimizer's update, and of the messages after it.
    """

    layers: float
    again: float
    messages: float
    borders: float
    bubble: float
    replicas: float
    update: float

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return float_sum(self.shares.values())

    @property
    def shares(self) -> Mapping[str, float]:
        """The seconds by what they go into."""
        return {
            "layers": self.layers,
            "computed again": self.again,
            "messages in layers": self.messages,
            "borders of stages": self.borders,
            "bubble": self.bubble,
            "gathers and reductions": self.replicas,
            "update": self.update,
        }


class StepModel:
    """A run on a cluster on paper: what each stage takes.

    Args:
        run: The run, of a GPT or a Llama on tensor ranks in a row.
        model: Its model.
        cluster: The cluster.
        order: In what order ranks fill it.
        software: What the program does with its messages.

    Attributes:
        world: The run's ranks.
        chunks: Stages of a pipeline rank.
        held: The parameters of each stage on one actor.
        border: Seconds in which a value gets to the next stage.
        replicas: The messages between replicas.
        hides: Whether reductions go on beside the backward.
    """

    def __init__(
        self, run: Run, model: GPT | Llama, cluster: Cluster, order: Order = LADDER, software: Software = RAYPAR
    ) -> None:
        self.hides = software.is_hiding(run.mesh)
        self._slices = loss_slice(run, model) is not None and software.slices_loss
        self.run, self.model, self.cluster = run, model, cluster
        self.world = world_of(run)
        self.chunks = run.chunks or 1
        count = self.chunks * run.mesh.pp
        self._messages = messages_of(run, model, cluster, order, software)
        self.border = self._messages.border
        self.held = held_by_stage(model, stage_layers(model, run.split, count), run.mesh)
        self.replicas = ReplicaMessages(run, self.world, cluster, order)

    @cached_property
    def stages(self) -> list[StageSeconds]:
        """The seconds of each stage for a microbatch."""
        return stages_of(
            self.run, self.model, self.cluster.device, self._messages, len(self.held), slices_loss=self._slices
        )

    def stages_on(self, rank: int) -> list[int]:
        """Return the stages of a pipeline rank."""
        pp = self.run.mesh.pp
        if self.run.schedule in V_SHAPED:
            return [rank, 2 * pp - 1 - rank]
        return [*range(rank, self.chunks * pp, pp)]

    def held_on(self, rank: int) -> StageParameters:
        """Return the parameters of a pipeline rank on one actor."""
        return StageParameters(*map(sum, zip(*(self.held[stage] for stage in self.stages_on(rank)), strict=True)))

    def update(self, rank: int) -> float:
        """Return the seconds of the update of a pipeline rank, and of the messages after it."""
        held = self.held_on(rank)
        moved = update_bytes(element_bytes(self.run), self.run.optim.states) * self.replicas.updated(held)
        own = moved / Roofline.of(self.cluster.device, half=False).bandwidth
        return own + self.replicas.after_update(held)

    @property
    def slowest_update(self) -> float:
        """Seconds of the update of the first or the last pipeline rank, which have most parameters."""
        return max(self.update(rank) for rank in {0, self.run.mesh.pp - 1})

    def exchanged(self, stage: int) -> tuple[float, float]:
        """Return the seconds of a stage's gather and of its reduction; 0 where there is none."""
        held, world = self.held[stage], self.world
        gather = self.replicas.gather(held) if world.gathers else 0.0
        return gather, self.replicas.reduction(held) if world.reduces else 0.0


#: Schedules that give a rank two stages, the second one on the way back.
V_SHAPED = ("zb-v", "v-half", "v-min")


def predicted(paper: StepModel) -> PredictedStep:
    """Predict a step in closed form.

    The busiest rank computes all its microbatches. While the pipeline fills and empties, it waits for one microbatch of
    one stage of each other rank, and for values on their way there and back. Reductions hide under the last
    backward but for one unit's, and gathers under the actions that they are for.

    Args:
        paper: The run on paper.

    Source: Narayanan et al. 2021, sections 2.2.1 and 2.2.2, with stages that are not equal.
    """
    run = paper.run
    ranks, m, v = run.mesh.pp, run.microbatches, paper.chunks
    on = [summed_times((paper.stages[stage], 1) for stage in paper.stages_on(rank)) for rank in range(ranks)]
    most = max(range(ranks), key=lambda rank: on[rank].both)
    busy = on[most]
    others = [one for rank, one in enumerate(on) if rank != most]
    waits, exposed = _of_replicas(paper, most, busy)
    empty = _empty(run.schedule, others) / v
    if run.schedule == "interleaved" and m < ranks:
        empty *= (v * ranks - m) / max(1, ranks - 1)  # rounds that are not full
    return PredictedStep(
        layers=m * (busy.forward + busy.backward),
        again=m * busy.again,
        messages=m * (busy.messages + busy.replies),
        borders=m * _waiting(paper, busy, others),
        bubble=empty + 2 * (ranks - 1) * paper.border,
        replicas=m * waits + exposed,
        update=paper.slowest_update,
    )


def _waiting(paper: StepModel, busy: StageSeconds, others: Sequence[StageSeconds]) -> float:
    """Return the seconds in which the busiest rank waits for values on their way, in each microbatch.

    With one stage a rank it waits for a value to go and another one to come. With more, it computes another stage's
    forward meanwhile, and with backwards in halves gradients of weights; then its neighbour sets the pace where
    computing and waiting take that one longer than the busiest rank computes.
    """
    if not others:
        return 0.0
    if paper.chunks == 1:
        return 2 * paper.border
    other = max(others, key=lambda one: one.both)
    waits = paper.chunks * paper.border - other.forward
    if paper.run.schedule in (*V_SHAPED, "zb-interleaved"):
        waits -= other.weights
    return max(0.0, other.both + max(0.0, waits) - busy.both)


def _empty(schedule: object, others: Sequence[StageSeconds]) -> float:
    """Return the seconds in which a rank computes nothing, if each other rank has these for a microbatch."""
    if schedule in ("zb-h1", "zb-interleaved"):
        return float_sum(max(0.0, one.both - 2 * one.weights) for one in others)
    if schedule in V_SHAPED:
        return float_sum(max(0.0, one.both - 3 * one.weights) for one in others)
    return float_sum(one.both for one in others)


def _of_replicas(paper: StepModel, rank: int, busy: StageSeconds) -> tuple[float, float]:
    """Return the seconds in which a rank waits for replicas: in each microbatch, and once a step."""
    stages = paper.stages_on(rank)
    gathers, reductions = (float_sum(each) for each in zip(*map(paper.exchanged, stages), strict=True))
    units = sum(paper.held[stage].units for stage in stages)
    beside = 1 - 1 / units
    if not paper.hides:
        return 0.0, reductions
    if not paper.world.frees_buckets:  # one reduction a step, under the last backward
        return 0.0, max(reductions - beside * busy.b, reductions / units)
    if paper.run.zero_gather == "step" and paper.world.gathers:
        gathers, once = 0.0, gathers
    else:
        once = 0.0
    forward = max(gathers - beside * busy.f, gathers / units)
    backward = max(gathers + reductions - beside * busy.b, gathers / units) + reductions / units
    return forward + backward, once


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
