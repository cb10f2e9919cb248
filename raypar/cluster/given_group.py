"""Actors in a placement group that others have made, as a Tune trial's or a quota's: which of its bundles have room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ray.util.placement_group import PlacementGroup as PlacementGroup
from ray.util.placement_group import get_current_placement_group, placement_group_table

from raypar.cluster.devices import ActorResources
from raypar.cluster.placement import amount_text, free_text, room, wants
from raypar.cluster.ray_private import free_resources, held_resources
from raypar.errors import ConfigError

_FIX = "give one that is there and has room, or leave placement_group out"
Bundles = Mapping[int, Mapping[str, float]]  # the resources of each bundle, by its number


def captured() -> PlacementGroup | None:
    """Return the placement group in which this process's own tasks are to run; None if it is in none, or a driver."""
    return get_current_placement_group()


def bundles_of_group(group: PlacementGroup) -> Bundles:
    """Return the bundles of a placement group that is there.

    Args:
        group: The group.

    Raises:
        ConfigError: It was removed, or is none of this cluster.
    """
    table: dict[str, Any] = placement_group_table(group)
    if not table or table.get("state") == "REMOVED":
        state = "was removed" if table else "is none of this cluster"
        raise ConfigError([f"placement_group {group.id.hex()} {state}: {_FIX}"])
    bundles: Bundles = table["bundles"]
    return bundles


def free_bundles(group: PlacementGroup, bundles: Bundles) -> Bundles:
    """Return what is free of the bundles of a placement group, which this process's task has a part of, say.

    Ray's view of that is old for a moment, and counts what a waiting task has as free. So this task's part is known.
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


def chosen_bundles(bundles: Bundles, share: ActorResources, actors: int) -> Sequence[int]:
    """Return a bundle for each actor, one bundle full before the next; fewer where there is no room for all.

    Args:
        bundles: What each bundle has for them.
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
    """Say what a placement group has, where as many actors need more.

    Args:
        group: The group.
        bundles: Its bundles.
        free: What is free of them; all of it, if they are too small in any case.
        share: The resources of an actor.
        actors: Number of actors.
    """
    has = "; ".join(
        f"bundle {number} "
        + " and ".join(
            f"{amount_text(kind, amount)} ({free_text(kind, free[number].get(kind, 0.0))} free)"
            for kind, amount in its.items()
        )
        for number, its in sorted(bundles.items())
    )
    each = " and ".join(amount_text(kind, amount) for kind, amount in wants(share).items())
    return (
        f"placement_group {_named(group)} has room for {len(chosen_bundles(free, share, actors))} of {actors} actors, "
        f"each with {each} ({has})"
    )
