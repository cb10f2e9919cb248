"""An actor's seat in a run: who it is there, where it computes, and whom it talks to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from raypar.actors.collective.group import Group, GroupError
from raypar.actors.data_parallel.replica_checks import demand_equal
from raypar.actors.device import Place
from raypar.actors.errors import ActionError, StaleError, described, trace
from raypar.actors.mesh.world import World
from raypar.actors.models.tied_weights import Tie
from raypar.actors.worker.plan import Plan


@dataclass(frozen=True, eq=False)
class Seat:
    """The place of one actor, a worker or a parameter server, in one run.

    plan    what it is told about the run
    groups  those that it has joined, by the keys of ``World.memberships``
    place   what it computes on
    """

    plan: Plan
    groups: Mapping[str, Group]
    place: Place

    @cached_property
    def world(self) -> World:
        """All ranks of the run."""
        return self.plan.world

    @cached_property
    def label(self) -> str:
        """The actor's name in messages."""
        return self.world.label(self.plan.rank)

    @cached_property
    def leads(self) -> bool:
        """Whether the actor speaks for its tensor group, where all have the same to say."""
        return self.world.leads(self.plan.rank)

    @cached_property
    def pp(self) -> int:
        """The pipeline rank that the actor belongs to."""
        return self.world.pp(self.plan.rank)

    @cached_property
    def dp(self) -> int:
        """A worker's replica; a server counts as the first one."""
        return self._coordinate[0]

    @cached_property
    def cp(self) -> int:
        """A worker's part of the sequence; a server counts as the first one."""
        return self._coordinate[1]

    @cached_property
    def _coordinate(self) -> tuple[int, int]:
        if self.plan.rank in self.world.server_ranks:
            return 0, 0
        coordinate = self.world.mesh.coordinate(self.plan.rank)
        return coordinate["dp"], coordinate["cp"]

    def connect(self, ties: Sequence[Tie]) -> None:
        """Connect the ends of every message of a step, so that nobody has to in the middle of one."""
        placement, cp = self.plan.programs["train"].placement, self.world.mesh.cp
        tied, ring = [(tie.home_rank, tie.copy_rank) for tie in ties], [(rank, (rank + 1) % cp) for rank in range(cp)]
        for key, pairs in (("pp", pairwise(placement)), ("cp", ring), (self.world.updaters, tied)):
            if key in self.groups:
                ends = {pair for pair in pairs if pair[0] != pair[1]}
                self.groups[key].connect(ends | {(there, here) for here, there in ends})

    def compare(self, owner: int, weights: Mapping[str, Tensor]) -> None:
        """Compare initial weights that belong to one owner with those that the other replicas have made.

        Raises:
            UnequalReplicasError: a replica has made other weights of the same plan.
        """
        for group in self.world.memberships(self.plan.rank):
            if group.key in ("dp", f"ps{owner}"):
                demand_equal(weights, self.groups[group.key], [self.world.label(rank) for rank in group.members])

    def synchronize(self) -> None:
        """Wait until every message so far is over: on GPUs nobody knows before whether one failed."""
        for group in self.groups.values():
            group.synchronize()

    def demand_current(self, epoch: int | None, current: int) -> None:
        """Refuse what the driver handed over before it knew that a step could not be made.

        Raises:
            StaleError: the call's epoch is before the current one.
        """
        if epoch is not None and epoch < current:
            raise StaleError(f"this call is of epoch {epoch}; {self.label} is in epoch {current}")

    def failed(self, action: str, peer: str | None, error: Exception) -> ActionError:
        """Abort every group, so that everybody who waits for this actor is let go; returns the error to raise."""
        for group in self.groups.values():
            group.abort()
        if isinstance(error, GroupError):
            return ActionError(self.label, action, peer or self._peer_of(error), error.reason, True, "")
        return ActionError(self.label, action, peer, described(error), False, trace())

    def _peer_of(self, error: GroupError) -> str | None:
        """The name of the peer of a failed communication, if there was one."""
        for group in self.world.memberships(self.plan.rank):
            if error.peer is not None and self.groups[group.key].name == error.group:
                return self.world.label(group.members[error.peer])
        return None
