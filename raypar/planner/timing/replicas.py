"""How long the exchange of gradients and weights between replicas takes, for each pipeline rank."""

from __future__ import annotations

import math

from raypar.actors.mesh.world import World
from raypar.actors.specs.run import Run
from raypar.planner.formulas.messages import Collective
from raypar.planner.hardware.cluster import Cluster
from raypar.planner.memory.worker import ElementBytes, element_bytes
from raypar.planner.sizes.parameters import StageParameters
from raypar.planner.timing.messages import LADDER, Order, collective_seconds, stride_of


class ReplicaMessages:
    """The messages between replicas of a run on a cluster.

    Args:
        run: The run.
        world: Its ranks.
        cluster: The cluster.
        order: In what order ranks fill it.
    """

    def __init__(self, run: Run, world: World, cluster: Cluster, order: Order = LADDER) -> None:
        self._world, self._each = world, element_bytes(run)
        self._bucket = run.bucket_mb * 2**20
        mesh, shards = run.mesh, world.owners if world.sharded else world.replicas
        inner = stride_of(mesh, "cp", order)
        adjacent = order.index("dp") + 1 == order.index("cp")
        outer = inner if adjacent or mesh.dp == 1 else stride_of(mesh, "dp", order)
        self._dense = shards, cluster.route(shards, outer)
        copies = world.replicas // shards
        self._copies = copies, cluster.route(copies, outer * shards)
        same = world.expert_replicas if world.experts is not None else 1
        self._experts = same, cluster.route(same, mesh.ep * mesh.expert_ranks)

    def reduction(self, held: StageParameters) -> float:
        """Return the seconds in which a stage's gradients are reduced once."""
        op: Collective = "reduce_scatter" if self._world.sharded else "all_reduce"
        return self._exchanged(op, self._each.gradient, held)

    def gather(self, held: StageParameters) -> float:
        """Return the seconds in which a stage's weights are gathered once, unit by unit."""
        return self._exchanged("all_gather", self._each.weight, held, pieces=held.units)

    def after_update(self, held: StageParameters) -> float:
        """Return the seconds of the messages about a rank's parameters after its update."""
        seconds = 0.0
        if self._world.sharded and not self._world.gathers:
            seconds += self._exchanged("all_gather", self._each.weight, held)
        if self._world.hybrid:
            copies, route = self._copies
            seconds += collective_seconds(
                "all_reduce", self._each.gradient * held.dense / self._world.owners, copies, route
            )
        return seconds

    def owned(self, held: StageParameters) -> float:
        """Return how many of a rank's parameters an actor updates."""
        if not self._world.sharded:
            return held.all
        return held.dense / self._dense[0] + held.experts / self._experts[0]

    def _exchanged(self, op: Collective, element: int, held: StageParameters, pieces: int | None = None) -> float:
        """Return the seconds of an operation on all parameters of a stage, in buckets or in so many pieces."""
        seconds = 0.0
        for count, (members, route) in ((held.dense, self._dense), (held.experts, self._experts)):
            number = pieces or max(1, math.ceil(element * count / self._bucket))
            seconds += number * collective_seconds(op, element * count / number, members, route)
        return seconds


def update_bytes(each: ElementBytes, states: int = 2) -> int:
    """Return the bytes that the update of a parameter reads and writes: its gradient, master, states and weight.

    Args:
        each: The bytes of elements.
        states: Values that the optimizer keeps for a parameter.
    """
    master = each.master or each.weight
    return each.gradient + 2 * (master + states * each.state) + (each.weight if each.master else 0)
