"""The cost model: how long the actions of a training step last, predicted from FLOPs and from bytes of messages.

A gather of a stage's weights over N replicas brings (N - 1) / N of their bytes to each, and a reduction that shares
gradients out takes as much of them away; an all_reduce is two of these. The two run beside the actions. STEP takes what
comes after the update: the exchange of new weights that level 3 does not need, and with hybrid sharding the sum over
the groups. RESHARD gives memory back, which costs nothing. Messages inside of layers (tensor, context and expert
parallelism) and the update itself are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from raypar.actors.models.partition import core_cost, split_layers, transformer_costs
from raypar.actors.specs.model import GPT, Layers, Llama, Transformer
from raypar.actors.specs.recompute import Recompute, word_of
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import Split
from raypar.planner.assumed_rates import Rates, halving_seconds, rates_of
from raypar.planner.memory.worker import element_bytes
from raypar.planner.sizes.sized_run import SizedRun
from raypar.schedules.action import Op
from raypar.schedules.float_sum import float_sum
from raypar.schedules.simulation.simulate import Costs


def seconds_of_run(sized: SizedRun, rates: Rates) -> Costs:
    """Return the estimated durations of the actions of a run's training step, in seconds.

    The FLOPs of the user's own Layers are not known: their unit is the forward of a stage, and messages cost nothing.

    Args:
        sized: The run.
        rates: What an actor does in a second.
    """
    run, _, counts, schedule = sized
    costs = costs_of_run(run, schedule.num_stages)
    if not isinstance(run.model, Transformer):
        return costs
    tokens = run.micro_batch_size * run.model.seq / run.mesh.cp / schedule.slices
    unit, placement = tokens / rates.flops, schedule.placement
    computing = {key: unit * cost / run.mesh.tp_of(placement[key[0]]) for key, cost in costs.of_stage.items()}
    parts = run.mesh.tensor_ranks if run.sequence_parallel or run.mesh.grid is not None else 1
    boundary = element_bytes(run).weight * run.model.hidden * tokens / parts
    return replace(
        costs,
        of_stage=computing | _exchanges(sized, rates),
        step=seconds_after_update(sized, rates),
        link=rates.message(boundary),
        reduce_beside=True,
        units=min(units.count for units in counts.units),
    )


def seconds_after_update(sized: SizedRun, rates: Rates) -> float:
    """Return the seconds of the messages after an update, on the pipeline rank where they take longest; the arguments
    are those of ``seconds_of_run``."""
    stages = map(sized.schedule.stages_of, range(sized.schedule.num_ranks))
    return max(_messages_after_update(sized, rates, each) for each in stages)


def _exchanges(sized: SizedRun, rates: Rates) -> dict[tuple[int, Op], float]:
    """Return the seconds of every stage's UNSHARD and REDUCE_GRAD. Offloaded tensors are moved as a whole."""
    run, world, counts, schedule = sized
    each = element_bytes(run)
    twice = 1 if world.sharded or world.servers or world.offload != "none" else 2
    found: dict[tuple[int, Op], float] = {}
    for stage, units in enumerate(counts.units):
        sharers = world.owners if world.sharded else world.replicas_at(schedule.placement[stage])
        part = 1.0 if world.servers or world.offload != "none" else 1 - 1 / sharers
        moved = units.gathered if world.offload == "none" else units.whole
        gradients = each.gradient * moved
        buckets = max(units.count if world.frees_buckets else 1, gradients / (run.bucket_mb * 2**20))
        found[stage, Op.UNSHARD] = rates.message(part * each.weight * moved, units.count)
        found[stage, Op.REDUCE_GRAD] = rates.message(twice * part * gradients, buckets)
    return found


def _messages_after_update(sized: SizedRun, rates: Rates, stages: Sequence[int]) -> float:
    """Return the seconds of the messages after the update of a pipeline rank with these stages."""
    run, world, counts, _ = sized
    each, held = element_bytes(run), sum(counts.units[stage].gathered for stage in stages)
    seconds = 0.0
    if (world.sharded or world.servers) and not world.gathers:
        part = 1.0 if world.servers else 1 - 1 / world.owners
        messages = max(1.0, world.servers, each.weight * held / (run.bucket_mb * 2**20))
        seconds += rates.message(part * each.weight * held, messages)
    if world.hybrid:
        copies = world.replicas // world.owners
        seconds += rates.message(2 * (1 - 1 / copies) * each.gradient * held / world.owners)
    return seconds


def costs_of_run(run: Run, num_stages: int) -> Costs:
    """Return the estimated durations of the compute actions of a run's training step, in FLOPs per token."""
    return costs_on_paper(run.model, num_stages, split=run.split, recompute=run.recompute)


def costs_with_halving(run: Run, num_stages: int) -> Costs:
    """Return the costs of ``costs_of_run`` plus the cost of splitting backwards, for the choice of which to split."""
    costs, model = costs_of_run(run, num_stages), run.model
    if not isinstance(model, Transformer):
        return costs
    tokens = run.micro_batch_size * model.seq / run.mesh.cp
    block = halving_seconds(run, tokens * model.hidden) * rates_of(run).flops / tokens
    of_stage = dict(costs.of_stage)
    for stage, layers in enumerate(split_layers(run.split, transformer_costs(model), num_stages)):
        of_stage[stage, Op.I] += block * len(layers)
    return replace(costs, of_stage=of_stage)


def flops_of_token(model: GPT | Llama, recompute: Recompute) -> tuple[float, float]:
    """Return the FLOPs of a token in a training step.

    Args:
        model: The model.
        recompute: What a backward recomputes.

    Returns:
        Those that the model needs, a forward and twice as many in the backward; and with what is recomputed.
    """
    (work,) = _works(model, 1, "even", recompute)
    frozen = 0.0 if model.lora is None else work.forward - model.layers * core_cost(model)  # they need no gradients
    return 3 * work.forward - frozen, 3 * work.forward - frozen + work.again


class _Work(NamedTuple):
    """The cost of one microbatch on one stage.

    Attributes:
        forward: Cost of its forward.
        again: Cost of what its backward recomputes.
        later: Cost of the weight gradients that its backward can leave for W.
    """

    forward: float
    again: float
    later: float


def costs_on_paper(
    model: GPT | Llama | Layers,
    num_stages: int,
    *,
    split: Split = "even",
    recompute: Recompute = "none",
) -> Costs:
    """Predict the costs of the compute actions of every stage.

    A forward costs the FLOPs of its layers, and a backward twice as much plus what it recomputes. FLOPs of the user's
    own Layers are unknown, so their stages count as equal.

    Args:
        model: The model.
        num_stages: Number of pipeline stages, at most the number of layers.
        split: How the layers are split into stages.
        recompute: What a backward recomputes.

    Returns:
        The costs of F, B, I and W of every stage, in FLOPs per token; for Layers, in forwards of a stage.
    """
    of_stage: dict[tuple[int, Op], float] = {}
    for stage, (forward, again, later) in enumerate(_works(model, num_stages, split, recompute)):
        backward = {Op.B: 2 * forward + again, Op.I: 2 * forward + again - later, Op.W: later}
        of_stage |= {(stage, op): cost for op, cost in ({Op.F: forward} | backward).items()}
    return Costs(of_stage=of_stage)


def _works(model: GPT | Llama | Layers, num_stages: int, split: Split, recompute: Recompute) -> list[_Work]:
    """Compute the work of every stage.

    A backward can leave the weight gradients of linear layers for W if these are not recomputed one by one, and of the
    user's own if they are said to be in halves.
    """
    if not isinstance(model, Transformer):
        later = 1.0 if model.halves else 0.0
        return [_Work(1.0, 1.0 if recompute == "full" else 0.0, later)] * num_stages
    costs, body, core = transformer_costs(model), range(model.layers), core_cost(model)
    scores = model.attention == "materialised" or model.dropout > 0  # else the kernel recomputes them anyway
    words = [word_of(recompute, body, layer) for layer in body]
    again = [
        {"none": 0.0, "selective": core if scores else 0.0, "full": cost}[word]
        for word, cost in zip(words, costs, strict=True)
    ]
    alone = [word == "full" and recompute != "full" for word in words]
    of_weights = [0.0 if own else cost - core for cost, own in zip(costs, alone, strict=True)]
    return [
        _Work(*(float_sum(each[layer] for layer in layers) for each in (costs, again, of_weights)))
        for layers in split_layers(split, costs, num_stages)
    ]
