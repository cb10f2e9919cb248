"""A cluster on paper: nodes of equal devices, and the links at each level between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from raypar.planner.hardware.data_sheets import Device, Link

MOST_DEVICES = 1 << 20


@dataclass(frozen=True)
class RingRoute:
    """The link of one member of a group to its neighbour on a ring.

    Attributes:
        bandwidth: Bytes/s in one direction.
        latency: Seconds of a hop.
    """

    bandwidth: float
    latency: float

    def seconds(self, nbytes: float, hops: int) -> float:
        """Return the seconds of an operation in which a member sends so many bytes, in so many hops."""
        return nbytes / self.bandwidth + hops * self.latency if nbytes else 0.0


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices. Ranks fill them in turn: rank r is on node r // each_node.

    Attributes:
        device: What they have.
        nodes: Number of nodes.
        each_node: Devices of a node.
        inside: The link between devices of a node.
        between: The link between nodes, as that of one network adapter.
        adapters: Network adapters of a node.
        each_rack: Nodes of a rack; 0: all nodes are in one.
        across: The link between racks, as that of one network adapter; None: as between nodes.
    """

    device: Device
    nodes: int
    each_node: int
    inside: Link
    between: Link
    adapters: int
    each_rack: int = 0
    across: Link | None = None

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.nodes * self.each_node

    @property
    def num_racks(self) -> int:
        """Number of racks."""
        return -(-self.nodes // self.each_rack) if self.each_rack else 1

    def route(self, members: int, stride: int) -> RingRoute:
        """Return the route of a member of a group with a stride between ranks, while all such groups send at once.

        Members on one node reach each other over the link inside. If a group is on several nodes, its k members on a
        node share the adapters of k devices, and every member's bytes pass them once on a ring.

        Args:
            members: Number of members.
            stride: Ranks from a member to the next one.
        """
        reached, span = self.device.reached, members * stride
        if span <= self.each_node:
            return RingRoute(reached * self.inside.bandwidth, self.inside.latency)
        together = min(members, max(1, self.each_node // stride))
        rack = self.each_rack * self.each_node
        outer = self.across if self.across is not None and rack and span > rack else self.between
        share = outer.bandwidth * self.adapters * together / self.each_node
        return RingRoute(reached * min(self.inside.bandwidth, share), outer.latency)

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the counts and the figures."""
        least = {"nodes": 1, "each_node": 1, "adapters": 1, "each_rack": 0}
        for name, low in least.items():
            if (count := getattr(self, name)) < low:
                yield f"{name} is {count}: it must be {low} or more"
        if self.size > MOST_DEVICES:
            yield f"{self.size:,} devices are more than the {MOST_DEVICES:,} that are planned: use fewer"
        yield from self.device.faults()
        for link in dict.fromkeys((self.inside, self.between, *([self.across] if self.across else []))):
            yield from link.faults()
        if self.each_rack and self.across is None:
            yield "each_rack is given, but no link across racks: give across, or leave each_rack out"
        if self.across is not None and not self.each_rack:
            yield "across is given, but not how many nodes a rack has: give each_rack, or leave across out"

    def __str__(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes:,} nodes"
        inside = f"{self.inside.name} inside of nodes" if self.each_node > 1 else "one device a node"
        between = f", {self.adapters} x {self.between.name} between them" if self.nodes > 1 else ""
        racks = f", {self.across.name} across {self.num_racks} racks" if self.across else ""
        return f"{self.size:,} {self.device.name} on {nodes}: {inside}{between}{racks}"
