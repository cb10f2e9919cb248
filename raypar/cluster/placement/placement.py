"""Placement of actors on nodes: links with the most traffic are inside a node, those with the least between racks.

The bandwidth ladder: a tensor group communicates in every layer, a context group in every attention, replicas once a
step, and pipeline neighbours once a microbatch, but only the activations of one boundary. So blocks of ranks are kept
whole from the inside out: ``tp`` on one node, then ``cp``, then ``dp``, then ``pp``. Where nodes have labels of racks,
whole replicas stay in one rack, because their sum over ``dp`` overlaps the backward (Pangu-alpha, arXiv 2104.12369).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from raypar.actors.mesh.mesh import AXES, Axis
from raypar.actors.mesh.world import World
from raypar.actors.specs.resources import PlacementStrategy
from raypar.cluster.placement.devices import ActorResources
from raypar.schedules.grouped import grouped

RACK = "rack"  # the label of nodes, as in ray start --labels=rack=a
_EPSILON = 1e-9
_MOST_NODES = 8  # nodes that a message names
# From the axis that may cross nodes first to the one that may do so last.
_LADDER: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")
_RACK_LADDER: tuple[Axis, ...] = ("dp", "pp", "cp", "tp")


@dataclass(frozen=True)
class Node:
    """A node of the cluster.

    Attributes:
        id: Its id in Ray.
        name: Its host name.
        address: Its IP address.
        total: Its resources, by Ray's names: CPU, GPU and others.
        free: Its free resources.
        labels: Its labels; ``rack`` names its rack.
    """

    id: str
    name: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def rack(self) -> str:
        """The value of the label ``rack``; "" without one."""
        return self.labels.get(RACK, "")

    def __str__(self) -> str:
        return f"{self.name} ({self.address})" if self.name != self.address else self.name


@dataclass(frozen=True)
class Placement:
    """The node of each rank.

    Attributes:
        nodes: The node of each rank; None for a rank for which no node has room.
        split: The tensor groups that are on several nodes, as ranks.
    """

    nodes: tuple[Node | None, ...]
    split: tuple[tuple[int, ...], ...]

    @property
    def missing(self) -> int:
        """Number of actors for which no node has room."""
        return self.nodes.count(None)

    def is_worse_than(self, other: Placement) -> bool:
        """Return whether fewer actors have room, or more tensor groups are split."""
        return self.missing > 0 or len(self.split) > len(other.split)


def wants(share: ActorResources) -> dict[str, float]:
    """Return the resources of an actor, by Ray's names."""
    return {"CPU": share.cpus} | ({"GPU": share.gpus} if share.gpus else {}) | dict(share.others)


def room(resources: Mapping[str, float], share: ActorResources) -> int:
    """Return the number of actors for which resources are enough. A part of a GPU is on one GPU."""
    found = min(
        math.floor(resources.get(name, 0.0) / amount + _EPSILON)
        for name, amount in wants(share).items()
        if name != "GPU"
    )
    if share.gpus:
        each = math.floor(1 / share.gpus + _EPSILON)
        found = min(found, math.floor(resources.get("GPU", 0.0) + _EPSILON) * each)
    return max(0, found)


def may_have(node: Node, share: ActorResources) -> bool:
    """Return whether a node has the labels that actors require."""
    return all(is_selected(node.labels.get(name), wanted) for name, wanted in share.labels.items())


def is_selected(value: str | None, wanted: str) -> bool:
    """Return whether Ray selects a node by one of its labels.

    Args:
        value: The value of the label; None if the node has none.
        wanted: A word, !word, in(a,b) or !in(a,b).
    """
    excludes, wanted = wanted.startswith("!"), wanted.removeprefix("!")
    several = wanted.startswith("in(") and wanted.endswith(")")
    words = [word.strip() for word in wanted[3:-1].split(",")] if several else [wanted]
    return (value in words) != excludes


def place(
    world: World,
    nodes: Sequence[Node],
    share: ActorResources,
    strategy: PlacementStrategy = "PACK",
    *,
    free: bool = True,
) -> Placement:
    """Place the actors of a world.

    Args:
        world: The world.
        nodes: The nodes.
        share: The resources of each actor.
        strategy: Whether actors fill few nodes or spread over many.
        free: Whether only free resources count; False counts all resources of the nodes.
    """
    left = {node.id: room(node.free if free else node.total, share) if may_have(node, share) else 0 for node in nodes}
    found = _Filling(world, nodes, left)
    if strategy == "PACK":
        found.settle_workers()
        for rank in range(world.mesh.size, world.size):  # expert actors and servers
            found.settle((rank,), ())
    elif strategy == "STRICT_PACK":
        found.settle(tuple(range(world.size)), ())
    else:
        found.spread(blocks_of(world), again=strategy == "SPREAD")
    node_of = tuple(found.of.get(rank) for rank in range(world.size))
    ids = [None if node is None else node.id for node in node_of]
    split = [ranks for ranks in blocks_of(world) if len({ids[rank] for rank in ranks} - {None}) > 1]
    return Placement(node_of, tuple(split))


class _FreeNodes:
    """Nodes sorted by the number of actors for which they still have room. Each query takes logarithmic time.

    Args:
        nodes: The nodes.
        left: The number of actors for which each has room, by its id.
    """

    def __init__(self, nodes: Sequence[Node], left: Mapping[str, int]) -> None:
        self._nodes = list({node.id: node for node in nodes}.values())
        self._left = {node.id: left[node.id] for node in self._nodes}
        self._number = {node.id: number for number, node in enumerate(self._nodes)}
        self._sorted = sorted((left[node.id], number) for number, node in enumerate(self._nodes))
        self.total = sum(self._left.values())

    def has(self, node: Node | None, count: int) -> TypeGuard[Node]:
        """Return whether a node is one of these, and has room for ``count`` actors."""
        return node is not None and self._left.get(node.id, -1) >= count

    def fitting(self, count: int) -> Node | None:
        """Return the node with the least room that is enough for ``count`` actors; of several, the first."""
        at = bisect_left(self._sorted, (count, -1))
        return self._nodes[self._sorted[at][1]] if at < len(self._sorted) else None

    def largest(self) -> Node:
        """Return the node with the most room; of several, the first."""
        return self._nodes[self._sorted[bisect_left(self._sorted, (self._sorted[-1][0], -1))][1]]

    def close(self, node: Node) -> None:
        """Exclude a node from further actors."""
        self.take(node, self._left[node.id])

    def take(self, node: Node, count: int) -> None:
        """Place ``count`` actors on a node, if it is one of these."""
        if node.id in self._left:
            number = self._number[node.id]
            del self._sorted[bisect_left(self._sorted, (self._left[node.id], number))]
            self._left[node.id] -= count
            self.total -= count
            insort(self._sorted, (self._left[node.id], number))


class _Filling:
    """Nodes that are being filled with actors.

    Args:
        world: The world whose actors are placed.
        nodes: The nodes.
        left: The number of actors for which each node still has room, by its id.
    """

    def __init__(self, world: World, nodes: Sequence[Node], left: Mapping[str, int]) -> None:
        self._world, self._everywhere = world, _FreeNodes(nodes, left)
        in_racks = grouped((node.rack, node) for node in nodes)
        self._racks = {rack: _FreeNodes(members, left) for rack, members in in_racks.items()}
        self._last: Node | None = None
        self.of: dict[int, Node] = {}

    def settle_workers(self) -> None:
        """Place the workers of the mesh."""
        everyone = tuple(range(self._world.mesh.size))
        if len(self._racks) < 2 or self._everywhere.fitting(len(everyone)):
            self.settle(everyone, _LADDER)
            return
        for replica in self._parts(everyone, "dp"):
            enough = [rack for rack in self._racks.values() if rack.total >= len(replica)]
            self.settle(replica, _RACK_LADDER[1:], min(enough, key=lambda rack: rack.total, default=None))

    def settle(self, ranks: tuple[int, ...], ladder: Sequence[Axis], among: _FreeNodes | None = None) -> None:
        """Place a block of ranks on one node; else its parts along the first axis of the ladder that divides it."""
        among = self._everywhere if among is None else among
        if node := among.fitting(len(ranks)):
            self._put(ranks, node)
            return
        if not ladder or len(ranks) == 1:
            return
        parts, rest = self._parts(ranks, ladder[0]), len(ranks)
        for index, part in enumerate(parts):
            if among.has(self._last, len(part)):
                self._put(part, self._last)
            elif node := among.fitting(rest):
                self._put(tuple(rank for later in parts[index:] for rank in later), node)
                return
            elif among.has(node := among.largest(), len(part)):
                self._put(part, node)
            else:
                self.settle(part, ladder[1:], among)
            rest -= len(part)

    def spread(self, blocks: Sequence[tuple[int, ...]], *, again: bool) -> None:
        """Place blocks of ranks, each on the node with the most room.

        Args:
            blocks: The blocks.
            again: Whether a node may get several of them.
        """
        taken = set[str]()
        for ranks in blocks:
            node = self._everywhere.largest()
            if not self._everywhere.has(node, len(ranks)):
                if again:
                    self.settle(ranks, _LADDER)
                continue
            self._put(ranks, node)
            if not again and node.id not in taken:
                taken.add(node.id)
                self._everywhere.close(node)

    def _parts(self, ranks: tuple[int, ...], axis: Axis) -> list[tuple[int, ...]]:
        parts = grouped((self._world.mesh.coordinate(rank)[axis], rank) for rank in ranks)
        return [tuple(part) for part in parts.values()]

    def _put(self, ranks: tuple[int, ...], node: Node) -> None:
        self._everywhere.take(node, len(ranks))
        self._racks[node.rack].take(node, len(ranks))
        self._last = node
        self.of.update(dict.fromkeys(ranks, node))


def blocks_of(world: World, split: Collection[tuple[int, ...]] = ()) -> list[tuple[int, ...]]:
    """Return the ranks of a world in blocks for one node each: tensor groups, and each other rank alone.

    Args:
        world: The world.
        split: Tensor groups that are on several nodes; each of their ranks is a block.
    """
    mesh, blocks = world.mesh, list[tuple[int, ...]]()
    for first in range(0, mesh.size, mesh.tensor_ranks):
        group = tuple(range(first, first + mesh.tensor_ranks))
        blocks += [(rank,) for rank in group] if group in split else [group]
    return blocks + [(rank,) for rank in range(mesh.size, world.size)]


def placement_lines(world: World, placement: Placement, nodes: Sequence[Node]) -> Iterator[str]:
    """Yield a line for each node that has actors: its name and theirs."""
    ranks_on = grouped((host.id, rank) for rank, host in enumerate(placement.nodes) if host is not None)
    for node in nodes:
        if ranks := ranks_on.get(node.id):
            yield f"{node}: {', '.join(world.label(rank) for rank in ranks)}"


def split_message(world: World, placement: Placement, share: ActorResources) -> str:
    """Return a message with the tensor groups on several nodes, the reason, and the fix."""
    first, count = placement.split[0], len(placement.split)
    names = " and ".join(dict.fromkeys(str(placement.nodes[rank]) for rank in first))
    others = f" (and {count - 1} more)" if count > 1 else ""
    size, unit = len(first), "GPUs" if share.gpus else "CPUs"
    at = world.mesh.coordinate(first[0])
    which = " ".join(
        f"{axis}={at[axis]}" for axis in AXES if axis == "pp" or (axis != "tp" and world.mesh.ways(axis) > 1)
    )
    return (
        f"the tensor group of {which}{others} lies on {names}, as no node has room for its {size} actors: every layer "
        f"waits for the network; use nodes with {size} free {unit}, or a smaller tp"
    )


def room_text(nodes: Sequence[Node], share: ActorResources) -> str:
    """Describe the room of each node; of many nodes, those that come nearest to the resources of an actor."""
    some = nodes
    if len(nodes) > _MOST_NODES:

        def falls_short(node: Node) -> tuple[bool, int, int]:
            lacks = sum(node.total.get(name, 0.0) < amount for name, amount in wants(share).items())
            return not may_have(node, share), lacks, -room(node.total, share)

        some = sorted(nodes, key=falls_short)[:_MOST_NODES]
    more = f" and {len(nodes) - len(some)} more" if len(nodes) > len(some) else ""
    return ", ".join(f"{node} has {_has(node, share)}" for node in some) + more


def amount_text(name: str, amount: float) -> str:
    """Return an amount of a resource as text, such as "2 CPUs" and "8.0 GiB memory"."""
    if name == "memory":
        return f"{amount / 2**30:.1f} GiB memory"
    plural = "s" if name in ("CPU", "GPU") and amount != 1 else ""
    return f"{amount:g} {name}{plural}"


def _has(node: Node, share: ActorResources) -> str:
    unlike = [
        f"label {name}={node.labels[name]}" if name in node.labels else f"no label {name}"
        for name, wanted in share.labels.items()
        if not is_selected(node.labels.get(name), wanted)
    ]
    if unlike:
        return f"{' and '.join(unlike)}: room for 0"
    amounts = {unit: node.total.get(unit, 0.0) for unit in wants(share)}
    return f"{amounts_text(amounts, node.free)}: room for {room(node.total, share)}"


def amounts_text(amounts: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Return amounts of resources as text, and how much of each is free, such as "2 CPUs (1 free)"."""
    return " and ".join(
        f"{amount_text(name, amount)} ({free_text(name, free)} free)" for name, amount in amounts.items()
    )


def free_text(name: str, free: Mapping[str, float]) -> str:
    """Return the free amount of a resource as text."""
    amount = free.get(name, 0.0)
    return f"{amount / 2**30:.1f}" if name == "memory" else f"{amount:g}"
