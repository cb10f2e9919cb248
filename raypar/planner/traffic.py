"""How many bytes of weights, gradients and tokens for experts actors send in a step, and what a launch takes to draw
random initial values and to send them to all that hold parts of them, predicted before they start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from raypar.actors.models.partition import split_layers, transformer_costs
from raypar.actors.specs.model import Layers, Transformer
from raypar.actors.specs.optim import Muon
from raypar.actors.specs.recompute import word_of
from raypar.actors.specs.run import Run
from raypar.planner.memory.activations import ELEMENT_BYTES
from raypar.planner.memory.worker import element_bytes
from raypar.planner.sizes.sized_run import SizedRun
from raypar.schedules.passes.first_steps import first_steps
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.memory import traffic

Sent = Counter[tuple[str, str]]

DRAW = 4.3e-9  # seconds that one core takes to draw a normal value: docs/decisions/data_parallel.md, 2026-11-30
_FP32 = 4


def step_traffic(sized: SizedRun) -> dict[tuple[str, str], int]:
    """Return the bytes that an actor sends in a step, on average over the pipeline rank that sends most.

    An all_reduce over N replicas sends 2 (N - 1) / N of the gradients. A reduction that shares them out, the exchange
    of what replicas have updated, and a gather send half as much, as often as the schedule has them. With the gradient
    of each tensor goes a flag, which says whether there is one; with ZeRO, one for each replica that has a part of it.
    For experts that actors divide, N is the number of those that hold the same ones, and their tokens go by all_to_all.
    The parts that replicas have of each of Muon's matrices go to one of them by all_to_all, and back.
    The vote that opens the STEP, a few numbers, is left out.

    Args:
        sized: The run.

    Returns:
        The bytes by axis and op, as ``job.ledger()`` has them; {} if there are no replicas, and nobody to send tokens
        to.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 7.
    """
    run, world, counts, schedule = sized
    if schedule.stream:
        sized = sized._replace(schedule=first_steps(schedule, 1))
    sent = [Sent() for _ in counts.held]
    if world.replicas > 1 and not world.servers:
        shards = world.owners if world.sharded else world.replicas
        flags = shards if world.sharded else 1
        dense = [(units.whole - units.experts, units.num_parts(flags)) for units in counts.units]
        if world.mesh.is_uneven:  # each pipeline rank by itself
            for rank, found in enumerate(sent):
                alone = [Sent() for _ in sent]
                _add_replicas(alone, sized, dense, world.replicas_at(rank), "dp")
                found.update(alone[rank])
        else:
            _add_replicas(sent, sized, dense, shards, "shard" if world.hybrid else "dp")
            matrices = [one - other for one, other in zip(counts.matrices, counts.expert_matrices, strict=True)]
            _add_matrices(sent, sized, matrices, shards, "shard" if world.hybrid else "dp")
    if world.experts is not None:
        if world.expert_replicas > 1:
            flags = world.expert_replicas if world.sharded else 1
            of_experts = [(units.experts, units.num_expert_parts(flags)) for units in counts.units]
            _add_replicas(sent, sized, of_experts, world.expert_replicas, "edp")
            _add_matrices(sent, sized, counts.expert_matrices, world.expert_replicas, "edp")
        if isinstance(run.model, Transformer):
            _add_tokens(sent, run, run.model, sized.schedule)
    most = max(sent, key=Counter.total)
    return dict(most)


def initial_seconds(sized: SizedRun, rate: float) -> float:
    """Return the seconds in which actors draw the initial values and send them to each other, before the first step.

    Each of N actors that hold parts of the same tensors draws 1/N of their values. It then receives its slices of what
    the others of its tensor group draw, and what other replicas draw of its slices: all of it, or its spans alone where
    replicas keep no more. Constants count as if they were drawn, and tensors as if all were small.

    Args:
        sized: The run.
        rate: Bytes/s that an actor receives from the others.

    Returns:
        The seconds of the pipeline rank that takes longest; 0 if the values are read from a folder.
    """
    run, world, counts, _ = sized
    if isinstance(run.model, Transformer | Layers) and run.model.hf is not None:
        return 0.0
    none = [0] * len(counts.held)
    found = []
    for pp, (held, experts, frozen) in enumerate(
        zip(counts.held, counts.experts or none, counts.frozen or none, strict=True)
    ):
        replicas = world.replicas_at(pp) if world.sharded else 1
        of_experts = world.expert_replicas if world.sharded and world.experts is not None else 1
        is_divided = world.experts is not None and world.mesh.expert_ranks == 1
        alike = held + frozen - experts, world.mesh.tp_of(pp), replicas, held - experts
        apart = experts, 1 if is_divided else world.mesh.tp_of(pp), of_experts, experts
        seconds = 0.0
        for count, tensor_ranks, members, trained in (alike, apart):
            drawn = count / members  # this actor's share: count x tensor_ranks values of tensor_ranks x members actors
            slices = drawn * (tensor_ranks - 1) / tensor_ranks
            whole = count - trained if world.gathers else count
            spans = (count - whole) / members
            received = slices + (whole + spans) * (members - 1) / members
            seconds += drawn * DRAW + _FP32 * received / rate
        found.append(seconds)
    return max(found)


def _add_replicas(
    sent: Sequence[Sent], sized: SizedRun, held: Sequence[tuple[int, int]], shards: int, axis: str
) -> None:
    """Add what replicas send of weights and gradients, by pipeline rank.

    Args:
        sent: The bytes by axis and op, of each pipeline rank.
        sized: The run.
        held: By stage, the parameters that the same replicas hold, and the number of their flags.
        shards: Number of the replicas, or of those that share the weights out.
        axis: The axis of their group.
    """
    run, world, _, schedule = sized
    each = element_bytes(run)
    weights = [each.weight * count for count, _ in held]
    gradients = [each.gradient * (count + flags) for count, flags in held]
    moved = traffic(schedule, weights, gradients, shards)
    for rank, found in enumerate(sent):
        stages = schedule.stages_on(rank)
        reduced = sum(moved[stage].reduced_bytes for stage in stages)
        if not world.sharded:
            found[axis, "all_reduce"] += 2 * reduced
            continue
        found[axis, "reduce_scatter"] += reduced
        if world.gathers:
            found[axis, "all_gather"] += sum(moved[stage].gathered_bytes for stage in stages)
        else:
            found[axis, "all_gather"] += sum(weights[stage] for stage in stages) * (shards - 1) // shards
        if world.hybrid:
            copies = world.replicas // shards
            own = sum(gradients[stage] for stage in stages) // shards
            found["replicate", "all_reduce"] += 2 * own * (copies - 1) // copies


def _add_matrices(sent: Sequence[Sent], sized: SizedRun, matrices: Sequence[int], shards: int, axis: str) -> None:
    """Add the parts of Muon's matrices that replicas send to the one that computes a matrix, and of its results.

    Each replica has the N-th part of every matrix, and computes the N-th part of the matrices.

    Args:
        sent: The bytes by axis and op, of each pipeline rank.
        sized: The run.
        matrices: By pipeline rank, the parameters that Muon updates; empty if the optimizer is another one.
        shards: Number of the replicas that divide them.
        axis: The axis of their group.
    """
    if sized.world.sharded and isinstance(sized.run.optim, Muon):
        element = ELEMENT_BYTES[sized.run.optim.precision]
        for found, count in zip(sent, matrices, strict=True):
            found[axis, "all_to_all"] += 2 * element * count * (shards - 1) // shards**2


def _add_tokens(sent: Sequence[Sent], run: Run, model: Transformer, schedule: Schedule) -> None:
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
                sent[schedule.placement[stage]]["ep", "all_to_all"] += (4 + again) * bytes_
