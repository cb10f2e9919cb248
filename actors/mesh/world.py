"""The ranks of a run: workers of the mesh, then expert actors or parameter servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from raypar.actors.mesh.mesh import AXES, Axis, Mesh

DataParallel = Literal["all_reduce", "parameter_server"]
Zero = Literal[0, 1, 2, 3]
Offload = Literal["none", "optimizer", "parameters"]


class ReplicaGroup(NamedTuple):
    """The actors of a pipeline rank that hold the same weights: the experts of one actor, or all its other weights.

    Attributes:
        key: The key of their group.
        shard_key: The key of the group among which these weights are sharded.
        gather_key: The key of that group for messages with weights.
        owners: Number of actors among which the update of these weights is divided.
    """

    key: str
    shard_key: str
    gather_key: str
    owners: int


@dataclass(frozen=True)
class World:
    """All ranks of a run: ``mesh.size`` workers, then the experts or servers of pipeline rank 0, of rank 1, and so on.

    Attributes:
        mesh: The mesh of the workers.
        servers: Parameter servers per pipeline rank; 0 for none.
        zero: The ZeRO level: replicas share the update (1), also gradients (2), also weights (3), or nothing (0).
        offload: The tensors that workers store off their devices: the optimizer's, also the layers' weights, or none.
    """

    mesh: Mesh
    servers: int = 0
    zero: Zero = 0
    offload: Offload = "none"

    @classmethod
    def of(
        cls, mesh: Mesh, data_parallel: DataParallel, servers: int, zero: Zero | None, offload: Offload = "none"
    ) -> World:
        """Create the world of a run. Replicas share the update unless ``zero`` is 0."""
        if data_parallel == "parameter_server":
            return cls(mesh, servers)
        return cls(mesh, zero=(1 if zero is None else zero) if mesh.shards > 1 else 0, offload=offload)

    @property
    def size(self) -> int:
        """Number of actors."""
        return self.mesh.actors + self.mesh.pp * self.servers

    @property
    def trainers(self) -> range:
        """The ranks that perform rows: those of the mesh, and expert actors."""
        return range(self.mesh.actors)

    def is_expert(self, rank: int) -> bool:
        """Return whether a rank is an expert actor: one that holds experts and nothing else."""
        return self.mesh.size <= rank < self.mesh.actors

    def at(self, rank: int) -> dict[Axis, int]:
        """Return a worker's position on each axis; for an expert actor or a server only ``pp`` is not 0."""
        if rank < self.mesh.size:
            return self.mesh.coordinate(rank)
        return {axis: self.pp(rank) if axis == "pp" else 0 for axis in AXES}

    @property
    def replicas(self) -> int:
        """Largest number of actors with the same weights: dp x cp (context ranks train them together)."""
        return self.mesh.ways("dp") * self.mesh.cp

    def replicas_at(self, pp: int) -> int:
        """Return the number of actors with the same weights on one pipeline rank."""
        return self.mesh.dp_of(pp) * self.mesh.cp

    def reduces_at(self, pp: int) -> bool:
        """Return ``reduces`` for one pipeline rank."""
        return self.replicas_at(pp) > 1 or self.servers > 0 or self.offload != "none"

    @property
    def reduces(self) -> bool:
        """Whether gradients must be summed over replicas, sent to servers, or moved off the device."""
        return self.replicas > 1 or self.servers > 0 or self.offload != "none"

    @property
    def frees_buckets(self) -> bool:
        """Whether a worker frees gradient buckets as soon as they are reduced or moved off the device."""
        return self.zero > 1 or self.offload != "none"

    @property
    def sharded(self) -> bool:
        """Whether each replica updates a part of every weight."""
        return self.zero > 0

    @property
    def gathers(self) -> bool:
        """Whether workers hold only their parts of weights, and gather whole weights temporarily."""
        return self.zero == 3

    @property
    def unshards(self) -> bool:
        """Whether weights are on a worker's device only temporarily: gathered, or read from their storage."""
        return self.gathers or self.offload == "parameters"

    @property
    def hybrid(self) -> bool:
        """Whether weights are sharded inside groups of replicas, and every group has a copy of all of them."""
        return self.sharded and self.mesh.shards < self.replicas

    @property
    def owners(self) -> int:
        """Number of actors among which the update of a pipeline rank's weights is divided: of servers or replicas."""
        return self.servers or (self.mesh.shards if self.sharded else 1)

    @property
    def updaters(self) -> str:
        """The key of the group of all ranks that update parts of one model, or of one tensor rank's part of it."""
        if self.servers:
            return "servers"
        if self.mesh.divides_experts:
            return "mesh"
        if not self.sharded:
            return "pp"
        if self.mesh.pp > 1:
            return "mesh"
        return self.shard_key

    @property
    def dense(self) -> ReplicaGroup:
        """The actors that hold the same weights, without experts that are divided over actors."""
        return ReplicaGroup("dp", self.shard_key, "gather", self.owners)

    @property
    def experts(self) -> ReplicaGroup | None:
        """The actors that hold the same experts; None if experts are not divided over actors."""
        if not self.mesh.divides_experts:
            return None
        return ReplicaGroup("edp", "edp", "edp.gather", self.expert_replicas if self.sharded else 1)

    @property
    def expert_replicas(self) -> int:
        """Number of actors with the same experts, and the same part of them."""
        if self.mesh.expert_actors:
            return 1
        return self.mesh.inner // (self.mesh.ep * self.mesh.expert_ranks)

    @property
    def experts_stay(self) -> bool:
        """Whether each expert is always whole on its actor, because no other actor holds it."""
        return self.experts is not None and self.expert_replicas == 1 and self.offload != "parameters"

    @property
    def shard_key(self) -> str:
        """The key of the group of replicas among which weights are sharded."""
        return "shard" if self.hybrid else "dp"

    @property
    def copies(self) -> int:
        """Number of copies of the model, each of which replicas have in parts; 1 without hybrid sharding."""
        return self.replicas // self.mesh.shards if self.hybrid else 1

    def copy_of(self, rank: int) -> int:
        """Return the index of a worker's copy of the model: with hybrid sharding there are several, else only 0."""
        at = self.at(rank)
        return (at["dp"] * self.mesh.cp + at["cp"]) // self.mesh.shards if self.hybrid else 0

    def owner_rank(self, pp: int, owner: int, rank: int) -> int:
        """Return the rank, within the group of all updaters, of a server or replica of a pipeline rank.

        Args:
            pp: The pipeline rank.
            owner: The index of the server, or of the replica among those that share the update. Ignored if every
                replica updates all weights.
            rank: A worker on the same tensor rank; if every replica updates all weights, the replica itself.
        """
        if not self.mesh.divides_experts:
            return pp * self.owners + owner
        at = self.at(rank)
        replica = owner if self.sharded else at["dp"] * self.mesh.cp + at["cp"]
        ranks, own = (self.mesh.tensor_ranks, at["tp"]) if self.mesh.folds_experts else (1, 0)
        return (pp * self.replicas + replica) * ranks + own

    def is_first(self, rank: int, *, expert: bool = False) -> bool:
        """Return whether a worker is the first of the workers that update copies of the same weights.

        Args:
            rank: The worker or expert actor.
            expert: Whether the weights are its experts, which are divided over actors; else all other weights.
        """
        if self.sharded:
            return self.copy_of(rank) == 0
        if expert:
            return rank in (group[0] for group in self.mesh.groups("edp"))
        at = self.mesh.coordinate(rank)
        return at["dp"] == at["cp"] == 0

    def reports_ballot(self, rank: int) -> bool:
        """Return whether a worker reports the sum of the replicas' ballots to the group of all updaters.

        The first replica in such a group that has the sum reports it.
        """
        at = self.at(rank)
        if self.is_expert(rank) or (self.mesh.folds_experts and at["tp"] > 0):
            return False
        if self.mesh.is_uneven:
            return at["dp"] == at["tp"] == 0
        if self.sharded:
            return (at["dp"] * self.mesh.cp + at["cp"]) % self.mesh.shards == 0
        return not self.mesh.divides_experts or at["dp"] == at["cp"] == 0

    @property
    def server_ranks(self) -> range:
        """The ranks of the parameter servers, which come last."""
        return range(self.mesh.actors, self.size)

    def label(self, rank: int) -> str:
        """Name a rank in messages: ``pp=1``, ``pp=1 dp=0``, ``pp=1 expert=0``, ``server 0 of pp=1``."""
        if rank in self.trainers:
            return self.mesh.label(rank)
        return f"server {self.server_index(rank)} of pp={self.pp(rank)}"

    def pp(self, rank: int) -> int:
        """Return the pipeline rank of a rank."""
        if rank < self.mesh.size:
            return self.mesh.coordinate(rank)["pp"] if self.mesh.is_uneven else rank // self.mesh.inner
        if self.is_expert(rank):
            return (rank - self.mesh.size) // self.mesh.expert_actors
        return (rank - self.server_ranks.start) // self.servers

    def row(self, rank: int) -> int:
        """Return the row of a schedule that a rank performs: that of its pipeline rank, or of its replica."""
        pp = self.pp(rank)
        return sum(self.mesh.rank_dp[:pp]) + self.at(rank)["dp"] if self.mesh.rank_dp else pp

    def trainers_in(self, row: int) -> tuple[int, ...]:
        """Return the workers and expert actors that perform a row, the workers first."""
        if not self.mesh.rank_dp:
            return self.trainers_of(row)
        replicas = [(pp, dp) for pp, count in enumerate(self.mesh.rank_dp) for dp in range(count)]
        pp, dp = replicas[row]
        return tuple(self.mesh.rank(pp=pp, dp=dp, tp=tp) for tp in range(self.mesh.tp_of(pp)))

    def worker(self, row: int, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the worker of a row at a coordinate; if each replica has a row, dp is ignored."""
        return self.trainers_in(row)[tp] if self.mesh.is_uneven else self.mesh.rank(row, dp, cp, tp)

    def leads(self, rank: int) -> bool:
        """Return whether a rank reports for its tensor group, whose ranks have equal reports.

        Expert actors and servers always report.
        """
        return rank >= self.mesh.size or self.mesh.coordinate(rank)["tp"] == 0

    def server_index(self, rank: int) -> int:
        """Return a server's index among those of its pipeline rank."""
        return (rank - self.server_ranks.start) % self.servers

    def server_rank(self, pp: int, index: int) -> int:
        """Return the rank of a server of a pipeline rank."""
        return self.server_ranks.start + pp * self.servers + index

    def replica(self, dp: int) -> tuple[int, ...]:
        """Return the workers of one data-parallel replica by pipeline rank.

        It has the first rank of each tensor or context group. Pipeline ranks with fewer replicas use dp modulo their
        number.
        """
        return tuple(self.mesh.rank(pp=pp, dp=dp % self.mesh.dp_of(pp)) for pp in range(self.mesh.pp))

    def holders(self, dp: int) -> tuple[int, ...]:
        """Return the workers that together hold the weights of one data-parallel replica.

        They include the first rank of each tensor group, or all if they have different experts. With ZeRO stage 3 they
        are those of all replicas that shard the weights, else those of the replica and of its expert groups.
        """
        if not self.gathers:
            own = self.replica(dp)
            if self.mesh.expert_actors:
                return (*own, *range(self.mesh.size, self.mesh.actors))
            return tuple(sorted({one for rank in own for one in (self.mesh.group_of("ep", rank)[1])}))
        copy = self.copy_of(self.mesh.rank(dp=dp))
        every = self.mesh.folds_experts
        return tuple(rank for rank in self.trainers if (every or self.leads(rank)) and self.copy_of(rank) == copy)

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """Return the members of a worker's tensor group. If the worker is the first tensor rank, it comes first.

        An expert actor is alone.
        """
        return (rank,) if self.is_expert(rank) else self.mesh.group_of("tp", rank)[1]

    def replicas_of(self, pp: int) -> range:
        """Return the workers of one pipeline rank, in rank order, without its expert actors."""
        return self.mesh.ranks_of(pp)

    def trainers_of(self, pp: int) -> tuple[int, ...]:
        """Return the workers of one pipeline rank, and then its expert actors."""
        return (*self.replicas_of(pp), *self.mesh.experts_of(pp))
