"""The owners of parameters: for each parameter, the one of its replicas that updates it."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Owners:
    """The owners of the parameters of one pipeline rank, by number.

    The owners of weights that all replicas hold come first, then those of experts that are divided over actors. An
    owner of experts denotes one actor in each group of replicas of experts.

    Attributes:
        of: The owner of each parameter of the model, by logical name. For experts, only the entries of the experts on
            this actor's part of the mesh are valid.
        own: Numbers of the owners that are this actor.
        num_dense: Number of owners of weights that all replicas hold.
        count: Number of all owners.
        experts: Logical names of the experts' parameters, if experts are divided over actors.
    """

    of: Mapping[str, int]
    own: frozenset[int]
    num_dense: int
    count: int
    experts: frozenset[str]

    def rank(self, name: str) -> int:
        """Return the rank of a parameter's owner in the group of replicas that divide such parameters."""
        return self.of[name] - (self.num_dense if name in self.experts else 0)

    def is_own(self, name: str) -> bool:
        """Return whether this actor updates a parameter; no actor updates a frozen one."""
        return self.of.get(name) in self.own


def share_out(sizes: Mapping[str, int], owners: int) -> dict[str, int]:
    """Assign each parameter to an owner so that the owners have about the same number of bytes.

    Parameters are assigned whole, the largest first, each to the owner with the fewest bytes so far.

    Args:
        sizes: Size of each parameter in bytes, by logical name.
        owners: Number of owners.

    Returns:
        The index of each parameter's owner, by logical name.
    """
    loads = [(0, owner) for owner in range(owners)]
    owner_of = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, owner = loads[0]  # the first of the owners with the fewest bytes
        heapq.heapreplace(loads, (load + sizes[name], owner))
        owner_of[name] = owner
    return owner_of
