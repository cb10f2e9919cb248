"""How many bytes of weights and gradients the replicas of a run send in a step, predicted before it starts."""

from __future__ import annotations

from raypar.actors.mesh.world import World
from raypar.actors.specs.run import Run
from raypar.planner.memory import Counts, element_bytes
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.memory import traffic


def sent_bytes(run: Run, world: World, counts: Counts, schedule: Schedule) -> dict[tuple[str, str], int]:
    """Return the bytes that an actor sends in a step, on average over the pipeline rank that sends most.

    An all_reduce over N replicas sends 2 (N - 1) / N of the gradients. A reduction to their owners, a broadcast of what
    these have updated, and a gather send half as much, as often as the schedule has them. With the gradient of each
    tensor goes a flag, which says whether there is one. The vote that opens the STEP, a few numbers, is left out.

    Args:
        run: The run.
        world: Its ranks.
        counts: Its parameters.
        schedule: The lowered schedule of a training step.

    Returns:
        The bytes by axis and op, as ``job.ledger()`` has them; {} if there are no replicas.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 7.
    """
    if world.replicas == 1 or world.servers:
        return {}
    each, shards = element_bytes(run), world.owners if world.sharded else world.replicas
    weights = [each.weight * units.whole for units in counts.units]
    gradients = [each.gradient * (units.whole + units.tensors) for units in counts.units]
    moved = traffic(schedule, weights, gradients, shards)
    axis = "shard" if world.hybrid else "dp"
    found = [dict[tuple[str, str], int]() for _ in counts.held]
    for rank, sent in enumerate(found):
        stages = schedule.stages_of(rank)
        reduced = sum(moved[stage].reduced_bytes for stage in stages)
        if not world.sharded:
            sent[axis, "all_reduce"] = 2 * reduced
            continue
        sent[axis, "reduce"] = reduced
        if world.gathers:
            sent[axis, "all_gather"] = sum(moved[stage].gathered_bytes for stage in stages)
        else:
            sent[axis, "broadcast"] = sum(weights[stage] for stage in stages) * (shards - 1) // shards
        if world.hybrid:
            copies = world.replicas // shards
            own = sum(gradients[stage] for stage in stages) // shards
            sent["replicate", "all_reduce"] = 2 * own * (copies - 1) // copies
    return max(found, key=lambda sent: sum(sent.values()))
