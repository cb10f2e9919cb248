"""The error message if actors have no room: the resources they need, those of the nodes, and who holds them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from ray.util.placement_group import placement_group_table

from raypar.actors.mesh.world import World
from raypar.cluster.placement.devices import ActorResources, part_of_gpu
from raypar.cluster.placement.placement import (
    Node,
    amount_text,
    amounts_text,
    free_text,
    may_have,
    room,
    room_text,
    wants,
)
from raypar.schedules.float_sum import float_sum

TOO_SMALL = "use a smaller mesh or a larger cluster, or wait_for_nodes (--wait-for-nodes SECONDS) if nodes are to come"
_MOST_HOLDERS = 4  # jobs and placement groups that a message names


def no_room(world: World, nodes: Sequence[Node], why: str, share: ActorResources) -> str:
    """Describe the resources that the world needs and those of each node of the cluster.

    Args:
        world: The ranks.
        nodes: The nodes.
        why: The consequence or the fix, which ends the message.
        share: The resources of each actor.
    """
    wanted = wants(share)
    need = " and ".join(amount_text(name, world.size * amount) for name, amount in wanted.items())
    total = {name: float_sum(node.total.get(name, 0.0) for node in nodes) for name in wanted}
    free = {name: float_sum(node.free.get(name, 0.0) for node in nodes) for name in wanted}
    have = amounts_text(total, free) if len(wanted) > 1 else f"{total['CPU']:g} ({free_text('CPU', free)} free)"
    others = f" ({len(world.server_ranks)} of them servers)" if world.servers else ""
    if world.mesh.expert_actors:
        others = f" ({world.mesh.actors - world.mesh.size} of them for experts)"
    labels = " and ".join(f"{name}={value}" for name, value in share.labels.items())
    on = f" on nodes with {labels}" if labels else ""
    each = f" ({room_text(nodes, share)})" if len(nodes) > 1 or labels else ""
    return (
        f"mesh: {world.size} actors{others} need {need}{on}, the cluster has {have} "
        f"on {len(nodes)} node{'s' if len(nodes) != 1 else ''}{each}: {why}"
    )


def one_node_faults(world: World, nodes: Sequence[Node], share: ActorResources) -> Iterator[str]:
    """Yield a fault if actors that share GPUs over NCCL have no room on one node.

    Args:
        world: The ranks.
        nodes: The nodes.
        share: The resources of each actor.
    """
    usable = [node for node in nodes if may_have(node, share)]
    if any(room(node.total, share) >= world.size for node in usable):
        return
    parts = [part_of_gpu(math.ceil(world.size / node.total["GPU"])) for node in usable if node.total.get("GPU")]
    fits = [part for part in parts if any(room(n.total, replace(share, gpus=part)) >= world.size for n in usable)]
    fix = f"set resources.gpus to {max(fits):g}, so that all are on one, or " if fits else ""
    yield (
        f"shared_gpu is 'nccl', but no node has room for all {world.size} actors ({room_text(nodes, share)}), and "
        f"NCCL connects actors of one GPU on one node only: {fix}leave shared_gpu out"
    )


def holders(own: Collection[str]) -> str:
    """Name the jobs and placement groups that hold CPUs, those with most first; "" if none does.

    Args:
        own: The ids of groups to leave out.
    """
    held = Counter[str]()
    for claim in placement_group_table().values():
        if claim["state"] == "CREATED" and claim["placement_group_id"] not in own:
            held[_holder(claim["name"])] += round(
                float_sum(bundle.get("CPU", 0.0) for bundle in claim["bundles"].values())
            )
    most = ", ".join(f"{name} {cpus}" for name, cpus in held.most_common(_MOST_HOLDERS) if cpus)
    return f"; of the CPUs hold {most}" if most else ""


def _holder(name: str) -> str:
    """Return the name of the job of a placement group; that of the group if raypar did not create it."""
    return name.partition(" ")[0] if name.startswith("raypar-") else name or "a group without a name"
