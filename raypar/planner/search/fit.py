"""The most memory that an actor of a run needs, in closed form, for the first and the last pipeline rank."""

from __future__ import annotations

from statistics import median_low
from typing import NamedTuple

from raypar.planner.formulas.bubbles import zero_bubble_memory
from raypar.planner.memory.activations import stage_activations
from raypar.planner.memory.worker import WORKING_OF, element_bytes, process_bytes
from raypar.planner.sizes.tensors import matrix_ranks
from raypar.planner.timing.stages import stage_layers
from raypar.planner.timing.step import V_SHAPED, StepModel
from raypar.schedules.float_sum import float_sum

_UNDER_WAY = 2  # buckets that are being reduced, beside those that are filled


class Need(NamedTuple):
    """Bytes of an actor, by kind.

    Attributes:
        weights: Its weights, those included that are gathered for a while.
        gradients: Its gradients.
        optimizer: Masters and states.
        activations: What forwards keep for their backwards, and what comes and goes beside.
        process: What libraries take.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    process: float

    @property
    def bytes(self) -> float:
        """All of them."""
        return float_sum(self)


def need_of(paper: StepModel) -> Need:
    """Return the need of the actor that needs most: of the first pipeline rank, or of the last."""
    return max((_need_at(paper, rank) for rank in {0, paper.run.mesh.pp - 1}), key=lambda need: need.bytes)


def _need_at(paper: StepModel, rank: int) -> Need:
    """Return what an actor of a pipeline rank needs."""
    run, world, held = paper.run, paper.world, paper.held_on(rank)
    each, own = element_bytes(run), paper.replicas.updated(held)
    weights = each.weight * (own if world.gathers else held.all)
    if world.gathers:
        weights += each.weight * max(_gathered(paper, stage) for stage in paper.stages_on(rank))
    kept = _activations(paper, rank)
    kind, away = paper.cluster.device.kind, run.offload != "none"
    return Need(
        weights=weights,
        gradients=_gradients(paper, rank, own),
        optimizer=0.0 if away else (each.master + run.optim.states * each.state) * own,
        activations=kept * (1 + WORKING_OF[kind]),
        process=process_bytes(kind),
    )


def _gradients(paper: StepModel, rank: int, own: float) -> float:
    """Return the bytes of gradients and of buckets with them, of whose sums the actor gets so many.

    Those that go to host memory are all in buckets until the end of a step, if replicas sum them only then.
    """
    run, zero = paper.run, paper.world.zero
    waits = zero < 2 and run.mesh.ways("dp") > 1
    held = 0.0 if run.offload != "none" and not waits else own if zero > 1 else paper.held_on(rank).all
    return element_bytes(run).gradient * held + _in_buckets(paper, rank)


def _in_buckets(paper: StepModel, rank: int) -> float:
    """Return the bytes of gradients on their way, in buckets or larger matrices.

    One is filled while others are reduced.
    """
    if not paper.world.frees_buckets:
        return 0.0
    element = element_bytes(paper.run).gradient
    matrix = element * paper.model.hidden * paper.model.mlp_width / paper.run.mesh.tensor_ranks
    usual = max(matrix, paper.run.bucket_mb * 2**20)
    return max(min(element * paper.held[at].all, _passing(paper, at, usual)) for at in paper.stages_on(rank))


def _passing(paper: StepModel, stage: int, usual: float) -> float:
    """Return the bytes of gradients on their way of a stage.

    At an end of the model they are the largest gradient, that of its vocabulary, and a block's; else a few usual ones.
    """
    in_turn = (1 + _UNDER_WAY) * usual
    if 0 < stage < len(paper.held) - 1:
        return in_turn
    return max(in_turn, element_bytes(paper.run).gradient * sum(_units(paper, stage)))


def _gathered(paper: StepModel, stage: int) -> float:
    """Return the most parameters of two units of a stage in turn: two blocks, or the vocabulary and a block."""
    vocabulary, block = _units(paper, stage)
    return min(paper.held[stage].all, block + max(block, vocabulary))


def _units(paper: StepModel, stage: int) -> tuple[float, float]:
    """Return the parameters of the vocabulary, 0 if the stage is at no end of the model, and those of a block."""
    model, held = paper.model, paper.held[stage]
    ends = (stage == 0) + (stage == len(paper.held) - 1)
    vocabulary = model.vocab * model.hidden / matrix_ranks(paper.run.mesh)
    return vocabulary * min(1, ends), max(0.0, held.all - ends * vocabulary) / max(1, held.units - ends)


def _activations(paper: StepModel, rank: int) -> float:
    """Return the bytes that a pipeline rank keeps for its backwards at the most."""
    run, model = paper.run, paper.model
    stages = stage_layers(model, run.split, len(paper.held))
    on = paper.stages_on(rank)
    each = [stage_activations(run, model, stages[stage], model.layers) for stage in on]
    plain, most = median_low(one.kept for one in each), max(one.kept for one in each)
    # Of the stage with the head one microbatch is under way: its backward follows its forward.
    return in_flight(paper, rank) * plain + (most - plain) + max(one.passing for one in each)


def in_flight(paper: StepModel, rank: int) -> float:
    """Return of how many stages a pipeline rank keeps activations at a time."""
    run = paper.run
    p = paper.run.mesh.pp
    m = paper.run.microbatches
    v = paper.chunks
    if run.schedule in V_SHAPED:
        part = zero_bubble_memory(run.schedule)  # type: ignore[arg-type]
        return min(2 * m, 2 * p * part + (0 if run.schedule == "zb-v" else 3))
    if run.schedule == "interleaved":
        rounds = max(1, m // p)
        return min(2 * (p - rank - 1) + (v - 1) * -(-m // rounds) + 1, m * v)
    return m if run.schedule == "gpipe" else min(p - rank, m)
