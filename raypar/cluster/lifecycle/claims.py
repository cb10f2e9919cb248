"""The placement groups that a job claims: one for each block of actors that must be on one node.

A group can't shrink, and Ray moves its bundles from a lost node to another one, for which an autoscaler may add a node.
So every block has a separate group, which is removed with its last actor. Two launches could each hold a part of the
resources and wait for the part of the other one. To prevent this, a launch that waits while others wait removes its
groups for a random time.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from raypar.actors.mesh.world import World
from raypar.cluster.interrupts import patience
from raypar.cluster.lifecycle.replacement_actors import ActorBundle
from raypar.cluster.nodes.nodes import living_nodes
from raypar.cluster.placement.devices import ActorResources
from raypar.cluster.placement.placement import wants
from raypar.cluster.placement.shortage import holders, no_room
from raypar.cluster.ray_private import coming_nodes
from raypar.errors import RoomError

log = logging.getLogger(__name__)

_NODE_ID = "ray.io/node-id"  # the label that Ray gives each node
_SAY = 10.0  # seconds between two log lines while waiting
_LOOK = 0.5  # seconds between two checks of a placement group
_HOLD = 5.0  # seconds for which some of the groups are held while other jobs wait


@dataclass
class Claim:
    """The placement groups of a job. ``make`` requests them from Ray, ``wait`` waits until they have resources.

    Attributes:
        world: The ranks.
        pins: The blocks of actors, each of which must be on one node, with Ray's id of that; "" if Ray chooses it.
        share: The resources of each actor.
        job: The job's name, which begins the groups' names.
    """

    world: World
    pins: Sequence[tuple[tuple[int, ...], str]]
    share: ActorResources
    job: str
    _groups: list[PlacementGroup] = field(default_factory=list)

    def make(self) -> None:
        """Request the groups from Ray, without waiting for them."""
        with patience("their placement") as ctrl_c:  # a group that this object does not know would stay pending
            for block, node in self.pins:
                name = f"{self.job} {actor_name(self.world, block[0])}"
                self._groups.append(claimed(name, self.share, len(block), node))
        ctrl_c.heed()

    def wait(self, seconds: float) -> None:
        """Wait until all groups have their resources, with a log line every 10 s.

        Raises:
            RoomError: The resources are not free within ``seconds``.
        """
        begin = said = held = time.monotonic()
        while not self._have_room():
            now = time.monotonic()
            if now - begin > seconds:
                why = f"they were not free within {seconds:g} s; wait_for_room (--wait-for-room SECONDS) waits longer"
                raise RoomError([self._message(why)])
            if now - said > _SAY:
                said = now
                log.info("%s", self._message(f"waited for, {seconds - (now - begin):.0f} s are left"))
            if now - held > _HOLD and self._is_in_the_way():
                self.give_back()
                time.sleep(random.uniform(0.0, _HOLD))
                self.make()
                held = time.monotonic()

    def bundles(self) -> list[ActorBundle]:
        """Return the bundle of each rank, then those of actors without a rank. All groups must have their resources.

        Where Ray has chosen the nodes, blocks of equal size are exchangeable: successive ranks get those of one node.
        """
        tables: dict[str, Any] = placement_group_table()
        on = [tables[group.id.hex()]["bundles_to_node_id"][0] for group in self._groups]
        found = dict[int, ActorBundle]()
        for size in {len(block) for block, _ in self.pins}:
            alike = [index for index, (block, _) in enumerate(self.pins) if len(block) == size]
            chosen = alike if any(node for _, node in self.pins) else sorted(alike, key=lambda index: on[index])
            for index, group in zip(alike, chosen, strict=True):
                in_use = set(range(size))
                for bundle, number in enumerate(self.pins[index][0]):
                    found[number] = ActorBundle(self._groups[group], bundle, on[group], in_use)
        return [found[number] for number in range(len(found))]

    def give_back(self) -> None:
        """Remove all groups."""
        while self._groups:
            remove_placement_group(self._groups.pop())

    def _have_room(self) -> bool:
        """Return whether all groups have their resources; wait a moment for the first one that has not."""
        return all(group.wait(_LOOK) for group in self._groups)  # in short waits: Ray ignores Ctrl-C while waiting

    def _is_in_the_way(self) -> bool:
        """Return whether some groups have resources and some do not, while groups of other jobs wait."""
        own = {group.id.hex() for group in self._groups}
        states = {group["placement_group_id"]: group["state"] for group in placement_group_table().values()}
        waiting = {one for one, state in states.items() if state == "PENDING"}
        return any(states.get(one) == "CREATED" for one in own) and bool(waiting - own)

    def _message(self, why: str) -> str:
        """Return a message with the resources needed, those of the cluster, and the jobs that hold them."""
        own, table = {group.id.hex() for group in self._groups}, placement_group_table()
        sizes = [(len(block), group) for (block, _), group in zip(self.pins, self._groups, strict=True)]
        there = sum(size for size, group in sizes if table[group.id.hex()]["state"] == "CREATED")
        part = f"; room for {there} of {sum(size for size, _ in sizes)} actors is there" if there else ""
        coming = coming_nodes()
        added = "" if coming is None else f"; {coming or 'no'} node{'s are' if coming != 1 else ' is'} coming"
        return f"{no_room(self.world, living_nodes(), why, self.share)}{part}{added}{holders(own)}"


def claimed(name: str, share: ActorResources, actors: int = 1, node: str = "") -> PlacementGroup:
    """Request a placement group on one node, without waiting for it.

    Args:
        name: Name of the placement group.
        share: The resources of each actor.
        actors: Number of actors, each with a bundle.
        node: Ray's id of the node; "" for any node with the actors' labels.
    """
    selector = dict(share.labels) | ({_NODE_ID: node} if node else {})
    request: Any = placement_group  # its type annotations lack None
    selectors = [selector] * actors if selector else None
    group: PlacementGroup = request(
        [wants(share)] * actors, strategy="STRICT_PACK", name=name, bundle_label_selector=selectors
    )
    return group


def actor_name(world: World, number: int) -> str:
    """Return the name of a job's actor, such as "pp=0", or "spare 4" if it has no rank at first."""
    return world.label(number) if number < world.size else f"spare {number}"
