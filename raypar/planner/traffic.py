"""How many bytes of weights, gradients and tokens for experts actors send in a step, predicted before it starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from raypar.actors.mesh.world import World
from raypar.actors.models.partition import split_layers, transformer_costs
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.recompute import word_of
from raypar.actors.specs.run import Run
from raypar.planner.memory import Counts, element_bytes
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.memory import traffic


def sent_bytes(run: Run, world: World, counts: Counts, schedule: Schedule) -> dict[str, int]:
    """Return the bytes that an actor sends in a step by op, on average over the pipeline rank that sends most.

    An all_reduce over N replicas sends 2 (N - 1) / N of the weights. A reduction to their owners, a broadcast of what
    these have updated, and a gather send half as much, as often as the schedule has them. For experts that actors
    divide, N is the number of those that hold the same ones, and their tokens go by all_to_all.

    Args:
        run: The run.
        world: Its ranks.
        counts: Its parameters.
        schedule: The lowered schedule of a training step.

    Returns:
        The bytes by op; {} if there are no replicas, and nobody to send tokens to.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 7.
    """
    sent = [Counter[str]() for _ in counts.held]
    if world.replicas > 1 and not world.servers:
        dense = [units.whole - units.experts for units in counts.units]
        _add_replicas(sent, run, world, dense, schedule, world.owners if world.sharded else world.replicas)
    if world.experts is not None:
        if world.expert_replicas > 1:
            of_experts = [units.experts for units in counts.units]
            _add_replicas(sent, run, world, of_experts, schedule, world.expert_replicas)
        if isinstance(run.model, Transformer):
            _add_tokens(sent, run, run.model, schedule)
    most = max(sent, key=Counter.total)
    return dict(most)


def _add_replicas(
    sent: Sequence[Counter[str]], run: Run, world: World, parameters: Sequence[int], schedule: Schedule, shards: int
) -> None:
    """Add what replicas send of weights and gradients, by pipeline rank.

    Args:
        sent: The bytes by op, of each pipeline rank.
        run: The run.
        world: Its ranks.
        parameters: By stage, the parameters that the same replicas hold.
        schedule: The lowered schedule of a training step.
        shards: Number of the replicas, or of those that share the weights out.
    """
    each = element_bytes(run)
    weights = [each.weight * count for count in parameters]
    moved = traffic(schedule, weights, [each.gradient * count for count in parameters], shards)
    for rank, found in enumerate(sent):
        stages = schedule.stages_of(rank)
        reduced = sum(moved[stage].reduced_bytes for stage in stages)
        if not world.sharded:
            found["all_reduce"] += 2 * reduced
            continue
        found["reduce"] += reduced
        if world.gathers:
            found["all_gather"] += sum(moved[stage].gathered_bytes for stage in stages)
        else:
            found["broadcast"] += sum(weights[stage] for stage in stages) * (shards - 1) // shards
        if world.hybrid:
            copies = world.replicas // shards
            own = sum(each.gradient * parameters[stage] for stage in stages) // shards
            found["all_reduce"] += 2 * own * (copies - 1) // copies


def _add_tokens(sent: Sequence[Counter[str]], run: Run, model: Transformer, schedule: Schedule) -> None:
    """Add the rows that an actor sends to the experts of others and back, at an even load, by pipeline rank.

    A layer has two all_to_alls in a forward and two in a backward; a forward that is run again has two more. If experts
    have actors of their own, ranks send rows, and get back what these make of them.
    """
    mesh, moe = run.mesh, model.moe
    if moe is None:
        return
    tokens = model.seq * run.micro_batch_size // mesh.cp // (mesh.tensor_ranks if mesh.folds_experts else 1)
    row = model.hidden * element_bytes(run).weight
    away = tokens * moe.top_k if mesh.expert_actors else tokens * moe.top_k * (mesh.ep - 1) // mesh.ep
    bytes_ = away * row * schedule.num_microbatches // (2 if mesh.expert_actors else 1)  # each way from one side only
    stages = split_layers(run.split, transformer_costs(model), schedule.num_stages)
    for stage, blocks in enumerate(stages):
        for block in blocks:
            if model.num_experts(block):
                again = 2 if word_of(run.recompute, range(model.layers), block) == "full" else 0
                sent[schedule.placement[stage]]["all_to_all"] += (4 + again) * bytes_
