"""Actors in a placement group that raypar did not create, such as a Tune trial's or a quota's: bundles with room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ray.util.placement_group import PlacementGroup as PlacementGroup
from ray.util.placement_group import placement_group_table

from raypar.cluster.placement.devices import ActorResources
from raypar.cluster.placement.placement import amount_text, amounts_text, room, wants
from raypar.cluster.ray_private import free_resources, held_resources
from raypar.errors import ConfigError

_FIX = "give one that is there and has room, or leave placement_group out"
Bundles = Mapping[int, Mapping[str, float]]  # the resources of each bundle, by its number


def bundles_of_group(group: PlacementGroup) -> Bundles:
    """Return the bundles of a placement group.

    Args:
        group: The group.

    Raises:
        ConfigError: It was removed, or belongs to another cluster.
    """
    table: dict[str, Any] = placement_group_table(group)
    if not table or table.get("state") == "REMOVED":
        state = "was removed" if table else "is none of this cluster"
        raise ConfigError([f"placement_group {group.id.hex()} {state}: {_FIX}"])
    bundles: Bundles = table["bundles"]
    return bundles


def free_bundles(group: PlacementGroup, bundles: Bundles) -> Bundles:
    """Return the free resources of the bundles of a placement group, without those that this process's task holds.

    Ray's view lags for a moment, and counts the resources of a waiting task as free. So this task's are subtracted.
    """
    nodes, own = free_resources(), group.id.hex()
    if nodes is None:
        return bundles
    free, held = Counter[str](), held_resources()
    for node in nodes.values():
        free.update(node)

    def left(number: int, kind: str, amount: float) -> float:
        name = f"{kind}_group_{number}_{own}"
        return min(free[name], amount - held.get(name, 0.0))

    return {
        number: {kind: left(number, kind, amount) for kind, amount in resources.items()}
        for number, resources in bundles.items()
    }


def demand_one_node(group: PlacementGroup, bundles: Collection[int]) -> None:
    """Raise ConfigError if bundles of a placement group, by their numbers, are on several nodes."""
    node_of: Mapping[int, str] = placement_group_table(group).get("bundles_to_node_id", {})
    if len(nodes := {node_of.get(number) for number in bundles}) > 1:
        raise ConfigError(
            [
                f"shared_gpu is 'nccl', but placement_group {_named(group)} has its bundles on {len(nodes)} nodes, "
                "and NCCL connects actors of one GPU on one node only: give one of strategy STRICT_PACK, or leave "
                "shared_gpu out"
            ]
        )


def chosen_bundles(bundles: Bundles, share: ActorResources, actors: int) -> Sequence[int]:
    """Return a bundle for each actor, filling one bundle before the next; fewer if there is no room for all.

    Args:
        bundles: The available resources of each bundle.
        share: The resources of an actor.
        actors: Number of actors.
    """
    chosen = [number for number, resources in sorted(bundles.items()) for _ in range(room(resources, share))]
    return chosen[:actors]


def _named(group: PlacementGroup) -> str:
    """Return the id of a placement group, with its name if it has one."""
    name = placement_group_table(group).get("name")
    return f"{name!r} ({group.id.hex()})" if name else str(group.id.hex())


def too_small(group: PlacementGroup, bundles: Bundles, free: Bundles, share: ActorResources, actors: int) -> str:
    """Return the error message for a placement group that has too few resources for some actors.

    Args:
        group: The group.
        bundles: Its bundles.
        free: Their free resources; all of them, if the bundles are too small in any case.
        share: The resources of an actor.
        actors: Number of actors.
    """
    of_each = sorted(bundles.items())
    has = "; ".join(f"bundle {number} {amounts_text(resources, free[number])}" for number, resources in of_each)
    each = " and ".join(amount_text(kind, amount) for kind, amount in wants(share).items())
    return (
        f"placement_group {_named(group)} has room for {len(chosen_bundles(free, share, actors))} of {actors} actors, "
        f"each with {each} ({has})"
    )
