"""What an actor is in a run: its rank, its device, and its groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.group import Group
from raypar.actors.collective.replicas import GroupReplicas, RefusedReplicas, ReplicaMembers
from raypar.actors.data_parallel.replica_checks import (
    OtherInputsError,
    UnequalReplicasError,
    demand_equal,
    demand_same_layers,
    structure,
)
from raypar.actors.errors import ActionError, StaleError, described, user_traceback
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.mesh.memberships import Membership, memberships
from raypar.actors.models.base import Model
from raypar.actors.models.tied_weights import Ends
from raypar.actors.specs.model import Layers
from raypar.actors.worker.build.boundaries import neighbours
from raypar.actors.worker.build.plan import ActorPlan

_NAMED = 4  # actors of a group that an error names


@dataclass(eq=False)
class RankContext:
    """The rank, the device and the groups of one actor, a worker or a parameter server, in one run.

    Attributes:
        plan: The actor's plan.
        groups: The groups that it has joined, by the keys of ``World.memberships``.
        device: The device that it computes on.
        world: All ranks of the run.
        label: The actor's name in messages.
        leads: Whether the actor reports for its tensor group, whose members have the same results.
        pp: The pipeline rank that the actor belongs to.
        row: The row of a schedule that the actor performs.
        dp: Data-parallel coordinate of a worker; 0 for an expert actor or a server.
        cp: Context-parallel coordinate of a worker; 0 for an expert actor or a server.
    """

    plan: ActorPlan
    groups: Mapping[str, Group]
    device: ComputeDevice

    def __post_init__(self) -> None:
        self.world, rank = self.plan.world, self.plan.rank
        self.label = self.world.label(rank)
        self.leads = self.world.leads(rank)
        self.pp, self.row = self.world.pp(rank), self.world.row(rank)
        at = self.world.at(rank)
        self.dp, self.cp = at["dp"], at["cp"]

    def label_of(self, member: int | None) -> str | None:
        """Return the name in messages of a member of the actor's pipeline; None if there is none.

        Args:
            member: Its rank in the ``pp`` group.
        """
        if member is None:
            return None
        world, rank = self.world, self.plan.rank
        members = world.mesh.group_of("pp", rank)[1] if rank < world.mesh.size else ()
        return world.label(members[member]) if members else world.mesh.label(world.mesh.rank(pp=member))

    def replica(self, further: int) -> int:
        """Return the data-parallel coordinate ``further`` replicas on, cyclically."""
        return (self.dp + further) % self.world.mesh.dp

    @cached_property
    def replicas(self) -> ReplicaMembers | None:
        """The replicas with which this actor's layers exchange values (``rp.replicas``); None if there is one."""
        run = self.plan.run
        if run.mesh.ways("dp") == 1 or self.plan.rank >= self.world.mesh.size:
            return None
        return RefusedReplicas(run.replica_fault) if run.replica_fault is not None else GroupReplicas(self.groups["dp"])

    @cached_property
    def has_first_copy(self) -> bool:
        """Whether this actor saves the weights that it updates: of equal copies, the first is saved."""
        return self.plan.rank in self.world.server_ranks or self.world.is_first(self.plan.rank)

    @cached_property
    def has_first_copy_of_experts(self) -> bool:
        """Whether this actor saves the experts that it updates, if experts are divided over actors."""
        return self.plan.rank not in self.world.server_ranks and self.world.is_first(self.plan.rank, expert=True)

    def connect(self, ties: Sequence[Ends]) -> None:
        """Connect this actor in advance with all ranks that it exchanges messages with in a step.

        Args:
            ties: Tied weights whose ends are on different ranks; they exchange gradients.
        """
        edges, cp = neighbours(self.world, self.plan.programs["train"]), self.world.mesh.cp
        tied, ring = [pair for tie in ties for pair in tie.pairs], [(rank, (rank + 1) % cp) for rank in range(cp)]
        for key, pairs in (("pp", edges), ("cp", ring), (self.world.updaters, tied)):
            if key in self.groups:
                ends = {pair for pair in pairs if pair[0] != pair[1]}
                self.groups[key].connect(ends | {(there, here) for here, there in ends})

    def compare(self, keys: Collection[str], digests: Callable[[], Iterable[bytes]], when: str | None = None) -> None:
        """Check that all replicas have the same weights.

        Args:
            keys: Keys of groups whose members have the same weights; groups that do not exist are skipped.
            digests: Computes digests of this actor's weights. It is called only if there is a group.
            when: When in the run, as "in step 3"; None before the first step.

        Raises:
            UnequalReplicasError: A replica has other weights.
        """
        groups = [group for group in memberships(self.world, self.plan.rank) if group.key in keys]
        own = [*digests()] if groups else []
        for group in groups:
            labels = [self.world.label(rank) for rank in group.members]
            demand_equal(own, self.groups[group.key], labels, when)

    def compare_layers(self, model: Model) -> None:
        """Check that all actors that exchange parts of weights have built the same layers, if these are the user's.

        Args:
            model: This actor's model, without weights.

        Raises:
            UnequalReplicasError: Another actor has other layers.
        """
        if not isinstance(self.plan.run.model, Layers):
            return
        own = structure(model.names, model.skeleton)
        for group in memberships(self.world, self.plan.rank):
            if group.key in ("dp", "tp"):
                demand_same_layers(own, self.groups[group.key], [self.world.label(rank) for rank in group.members])

    def sum_ahead(self, tensor: Tensor) -> None:
        """Sum a small tensor on the host over the replicas of this actor, in place, before a step begins.

        Args:
            tensor: A tensor of any shape. With servers, where replicas do not communicate, it is summed over the
                context ranks of this actor's replica only.

        Raises:
            ActionError: The communication failed.
        """
        key = next((key for key in ("dp", "cp") if key in self.groups), None)
        if key is None:
            return
        with self.reports("beginning of step"):
            self.groups[key].host.all_reduce(tensor).wait()

    def synchronize(self) -> None:
        """Wait until all communication so far is complete. On a GPU a failure shows only then."""
        for group in self.groups.values():
            group.synchronize()

    def demand_current(self, epoch: int | None, current: int) -> int:
        """Refuse a call that the driver made before it knew that an earlier step was refused.

        A job that refused steps before this actor joined the run has a later epoch than the current one.

        Args:
            epoch: Epoch of the call; None to accept it in any case.
            current: This actor's epoch: the number of steps refused so far for non-finite gradients.

        Returns:
            The actor's epoch from now on.

        Raises:
            StaleError: The call's epoch is before the current one.
        """
        if epoch is not None and epoch < current:
            raise StaleError(f"this call is of epoch {epoch}; {self.label} is in epoch {current}")
        return current if epoch is None else epoch

    @contextmanager
    def reports(self, action: str) -> Iterator[None]:
        """Return a context in which a failed communication, or unequal replicas, raise the error of ``failed``."""
        try:
            yield
        except (GroupError, UnequalReplicasError) as error:
            raise self.failed(action, None, error) from None

    def failed(self, action: str, peer: str | None, error: Exception) -> ActionError:
        """Abort all groups, so that no other actor waits for this one, and return the error to raise.

        Args:
            action: The failed action, for the message.
            peer: Label of the action's peer; None if it has none. Then a failed communication names its own peer, or
                the other members of its group.
            error: Why it failed.
        """
        for group in self.groups.values():
            group.abort()
        if not isinstance(error, GroupError):
            follows = isinstance(error, OtherInputsError)
            return ActionError(self.label, action, peer, described(error), follows, "" if follows else user_traceback())
        groups = memberships(self.world, self.plan.rank)
        joined = next((one for one in groups if self._is_of(one, error)), None)
        if joined is None or peer is not None:
            return ActionError(self.label, action, peer, error.reason, True, "")
        latest = self.replicas.latest if self.replicas is not None and joined.key == "dp" else ""
        after = f"; the latest call here was {latest}" if latest and latest not in error.reason else ""
        if error.peer is not None:
            other = self.world.label(joined.members[error.peer])
            return ActionError(self.label, action, other, error.reason + after, True, "")
        others = [self.world.label(rank) for rank in joined.members if rank != self.plan.rank]
        reason = f"{error.reason}, in the {error.op} of {joined.key}{after}"
        return ActionError(self.label, action, _listed(others), reason, True, "")

    def _is_of(self, group: Membership, error: GroupError) -> bool:
        """Return whether a failed communication was in a group."""
        return self.groups[group.key].name == error.group


def _listed(actors: Sequence[str]) -> str:
    """List the actors of a group; of a large group, the first ones."""
    if len(actors) > _NAMED:
        return f"{', '.join(actors[:_NAMED])} and {len(actors) - _NAMED} more"
    return " and ".join(filter(None, [", ".join(actors[:-1]), actors[-1]]))
