"""How long the messages of a training step take on a cluster on paper, by axis.

How long the exchange of gradients and weights between replicas takes, for each pipeline rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from raypar.actors.mesh.mesh import Axis, Mesh
from raypar.actors.mesh.world import World
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.run import Run
from raypar.planner.formulas.messages import Collective, collective_bytes
from raypar.planner.hardware.cluster import Cluster, RingRoute
from raypar.planner.memory.activations import ELEMENT_BYTES
from raypar.planner.memory.worker import ElementBytes, element_bytes
from raypar.planner.sizes.parameters import StageParameters

#: From the outermost axis to the innermost one; the ranks of the last lie next to each other.
Order = tuple[Axis, ...]


LADDER: Order = ("pp", "dp", "cp", "tp")
RACKS: Order = ("dp", "pp", "cp", "tp")


def stride_of(mesh: Mesh, axis: Axis, order: Order = LADDER) -> int:
    """Return the difference of the ranks of neighbours along an axis.

    Args:
        mesh: The mesh.
        axis: The axis.
        order: The axes from the outermost to the innermost one.
    """
    return math.prod(mesh.ways(inside) for inside in order[order.index(axis) + 1 :])


def collective_seconds(op: Collective, nbytes: float, members: int, route: RingRoute) -> float:
    """Return how long a collective operation takes.

    Its bytes go round a ring. Small messages take a hop for each level of a tree and back for an all_reduce, and for
    the others a hop for each member.

    Args:
        op: The operation.
        nbytes: Bytes of the whole tensor; of all_to_all, of what a member has.
        members: Number of members.
        route: What each has to its neighbour.
    """
    if members == 1 or not nbytes:
        return 0.0
    hops = 2 * math.ceil(math.log2(members)) if op == "all_reduce" else members - 1
    return route.seconds(collective_bytes(op, nbytes, members), hops)


@dataclass(frozen=True)
class Software:
    """What a program does with its messages and its loss; the defaults are raypar's.

    Attributes:
        scatters: Whether each tensor rank sends a part of what goes to the next stage, which gathers it again
            (Narayanan et al. 2021, section 4.1); with sequence parallelism it has only that part anyway.
        hides: Whether reductions go on beside the backward: always, or only of runs without a pipeline, as in
            Megatron-LM of 2021 (--DDP-impl torch and local).
        slices_loss: Whether the loss of many logits is computed from slices of the vocabulary.
    """

    scatters: bool = False
    hides: Literal["always", "alone"] = "always"
    slices_loss: bool = True

    def is_hiding(self, mesh: Mesh) -> bool:
        """Return whether reductions go on beside the backward."""
        return self.hides == "always" or mesh.pp == 1


RAYPAR = Software()


@dataclass(frozen=True)
class Messages:
    """Seconds of the messages of one microbatch inside of a layer, and at the borders of stages.

    Attributes:
        tensor: Of one sum over tensor ranks; a layer's forward has two, and its backward two.
        context: Of a layer's keys and values along cp in a forward.
        hides: Whether ``context`` goes on beside attention, as round a ring.
        experts: Of one all_to_all; a layer with experts has two in its forward, and two in its backward.
        border: Of what goes from a stage to the next one.
    """

    tensor: float
    context: float
    hides: bool
    experts: float
    border: float


def messages_of(
    run: Run, model: GPT | Llama, cluster: Cluster, order: Order = LADDER, software: Software = RAYPAR
) -> Messages:
    """Return the seconds of the messages of a microbatch.

    Args:
        run: The run.
        model: Its model.
        cluster: The cluster.
        order: In what order ranks fill it.
        software: What the program does with its messages.
    """
    mesh, element = run.mesh, ELEMENT_BYTES[run.precision.layers]
    tokens = run.micro_batch_size * model.seq / mesh.cp
    one = element * tokens * model.hidden
    along = {axis: cluster.route(mesh.ways(axis), stride_of(mesh, axis, order)) for axis in order}
    parts = mesh.tensor_ranks if run.sequence_parallel or software.scatters else 1
    border = along["pp"].seconds(one / parts, 1) if mesh.pp > 1 else 0.0
    if software.scatters and not run.sequence_parallel:
        border += collective_seconds("all_gather", one, mesh.tensor_ranks, along["tp"]) if mesh.pp > 1 else 0.0
    return Messages(
        tensor=collective_seconds("all_reduce", one, mesh.tensor_ranks, along["tp"]),
        context=_context(run, model, tokens * element, along["cp"]),
        hides=run.context == "ring",
        experts=_experts(run, model, one, cluster),
        border=border,
    )


def _context(run: Run, model: GPT | Llama, token: float, route: RingRoute) -> float:
    """Return the seconds of a layer's forward along cp, of tokens with so many bytes for each unit of width."""
    cp, ranks, width = run.mesh.cp, run.mesh.tensor_ranks, model.head_size
    if cp == 1:
        return 0.0
    keys = 2 * token * width * max(model.num_kv_heads / ranks, 1.0)
    queries = 2 * token * width * model.heads / ranks
    if run.context == "ulysses":
        return collective_seconds("all_to_all", keys, cp, route) + collective_seconds("all_to_all", queries, cp, route)
    return collective_seconds("all_gather", keys * cp, cp, route)


def _experts(run: Run, model: GPT | Llama, tokens: float, cluster: Cluster) -> float:
    """Return the seconds of one all_to_all of tokens with so many bytes to their experts."""
    mesh, moe = run.mesh, model.moe
    if moe is None or mesh.ep == 1:
        return 0.0
    rows = moe.top_k * tokens / (mesh.tensor_ranks if mesh.folds_experts else 1)
    stride = 1 if mesh.folds_experts else mesh.expert_ranks
    return collective_seconds("all_to_all", rows, mesh.ep, cluster.route(mesh.ep, stride))


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

    def updated(self, held: StageParameters) -> float:
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
