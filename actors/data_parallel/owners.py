"""The parameter servers that own parameters, and the replicas that have no owner beside them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Owners:
    """Who updates the parameters of one pipeline rank, by number.

    A parameter server owns whole parameters. Without servers, all replicas that hold the same parameters have one
    number: 0 those of weights that all replicas hold, and the next one those of experts that are divided over actors.

    Attributes:
        of: The number of each parameter of the model, by logical name.
        own: The numbers of which this actor is one.
        num_dense: How many there are for weights that all replicas hold: one, or one for each server.
        count: How many there are.
        experts: Logical names of the experts' parameters, if experts are divided over actors.
    """

    of: Mapping[str, int]
    own: frozenset[int]
    num_dense: int
    count: int
    experts: frozenset[str]

    def is_own(self, name: str) -> bool:
        """Return whether this actor updates a parameter, or a part of it; no actor updates a frozen one."""
        return self.of.get(name) in self.own


def share_out(sizes: Mapping[str, int], owners: int) -> dict[str, int]:
    """Assign each parameter to a server so that the servers have about the same number of bytes.

    Parameters are assigned whole, the largest first, each to the server with the fewest bytes so far.

    Args:
        sizes: Size of each parameter in bytes, by logical name.
        owners: Number of servers.

    Returns:
        The index of each parameter's server, by logical name.
    """
    loads = [(0, owner) for owner in range(owners)]
    owner_of = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, owner = loads[0]  # the first of the servers with the fewest bytes
        heapq.heapreplace(loads, (load + sizes[name], owner))
        owner_of[name] = owner
    return owner_of
