"""Who takes part in a run, by rank: the workers of the mesh, then the parameter servers; and the groups they form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from raypar.actors.mesh.mesh import AXES, Mesh

DataParallel = Literal["all_reduce", "parameter_server"]
Zero = Literal[0, 1]


class Membership(NamedTuple):
    """One rank's place in a group.

    key      the group among this rank's groups: ``pp``, ``dp`` (all with the same weights, on cp too), ``cp``, ``tp``,
             ``tp.row`` (and other lines of a grid),
             ``mesh`` (of all workers, or of those of one coordinate on tp), ``ps0``, ``servers``
    axis     what its bytes are counted under
    name     unique in the run
    members  ranks, in the order of the group
    """

    key: str
    axis: str
    name: str
    members: tuple[int, ...]


@dataclass(frozen=True)
class World:
    """All ranks of a run: ``mesh.size`` workers, then the servers of pipeline rank 0, of pipeline rank 1, ...

    servers  parameter servers of each pipeline rank; 0 without
    sharded  whether replicas own a part of the weights each
    """

    mesh: Mesh
    servers: int = 0
    sharded: bool = False

    @classmethod
    def of(cls, mesh: Mesh, data_parallel: DataParallel, servers: int, zero: Zero | None) -> World:
        """The world of a run with these fields; replicas share the update unless ``zero`` is 0."""
        if data_parallel == "parameter_server":
            return cls(mesh, servers)
        return cls(mesh, sharded=zero != 0 and mesh.dp * mesh.cp > 1)

    @property
    def size(self) -> int:
        """Number of actors."""
        return self.mesh.size + self.mesh.pp * self.servers

    @property
    def replicas(self) -> int:
        """Actors with the same weights: those of all dp, and of all cp, for a sequence's parts are trained on alike."""
        return self.mesh.dp * self.mesh.cp

    @property
    def reduces(self) -> bool:
        """Whether gradients have to be summed over replicas, or sent to servers."""
        return self.replicas > 1 or self.servers > 0

    @property
    def owners(self) -> int:
        """Among how many actors of a pipeline rank (servers, or replicas) its weights are divided for the update."""
        return self.servers or (self.replicas if self.sharded else 1)

    @property
    def updaters(self) -> str:
        """The key of the group of all that update parts of one model, or of one tensor rank's part of it."""
        if self.servers:
            return "servers"
        if not self.sharded:
            return "pp"
        return "mesh" if self.mesh.pp > 1 else "dp"

    def owner_rank(self, pp: int, owner: int) -> int:
        """The rank, in the group of all updaters, of one of a pipeline rank's owners."""
        return pp * self.owners + owner

    @property
    def server_ranks(self) -> range:
        return range(self.mesh.size, self.size)

    def label(self, rank: int) -> str:
        """A rank's name in messages: ``pp=1``, ``pp=1 dp=0``, ``server 0 of pp=1``."""
        if rank < self.mesh.size:
            return self.mesh.label(rank)
        return f"server {self.server_index(rank)} of pp={self.pp(rank)}"

    def pp(self, rank: int) -> int:
        """The pipeline rank that a rank belongs to."""
        if rank < self.mesh.size:
            return rank // self._inner
        return (rank - self.mesh.size) // self.servers

    def leads(self, rank: int) -> bool:
        """Whether a rank speaks for its tensor group, where all have the same to say; a server speaks for itself."""
        return rank >= self.mesh.size or self.mesh.coordinate(rank)["tp"] == 0

    def server_index(self, rank: int) -> int:
        """Which one of its pipeline rank's servers this is."""
        return (rank - self.mesh.size) % self.servers

    def server_rank(self, pp: int, index: int) -> int:
        """The rank of a pipeline rank's server."""
        return self.mesh.size + pp * self.servers + index

    def replica(self, dp: int) -> tuple[int, ...]:
        """The workers of one data-parallel replica, by pipeline rank; of a tensor or context group the first."""
        return tuple(self.mesh.rank(pp=pp, dp=dp) for pp in range(self.mesh.pp))

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """The workers that hold parts of what a worker of the first tensor rank holds, itself first."""
        return self.mesh.group_of("tp", rank)[1]

    def replicas_of(self, pp: int) -> range:
        """The workers of one pipeline rank, by replica."""
        return range(pp * self._inner, (pp + 1) * self._inner)

    def memberships(self, rank: int) -> Iterator[Membership]:
        """A rank's groups, in the order of joining: nobody waits for a group that its peer would form later."""
        pp = self.pp(rank)
        if rank < self.mesh.size:
            for axis in AXES:
                index, members = self.mesh.replicas(rank) if axis == "dp" else self.mesh.group_of(axis, rank)
                if len(members) > 1 and not (axis == "dp" and self.servers):  # with servers nobody else is asked
                    yield Membership(axis, axis, f"{axis}/{index}", members)
            tp = self.mesh.tensor_ranks
            if self.mesh.grid is not None:
                for line, places in self.mesh.grid.lines(rank % tp):
                    members = tuple(rank - rank % tp + place for place in places)
                    yield Membership(f"tp.{line}", f"tp.{line}", f"tp.{line}/{members[0]}", members)
            if self.updaters == "mesh":
                yield Membership("mesh", "mesh", f"mesh/{rank % tp}", tuple(range(rank % tp, self.mesh.size, tp)))
            for index in range(self.servers):
                yield self._served(pp, index)
        else:
            yield self._served(pp, self.server_index(rank))
            if len(self.server_ranks) > 1:
                yield Membership("servers", "servers", "servers/0", tuple(self.server_ranks))

    def _served(self, pp: int, index: int) -> Membership:
        """The replicas of a pipeline rank and one of its servers, which is the last member."""
        members = (*self.replicas_of(pp), self.server_rank(pp, index))
        return Membership(f"ps{index}", "ps", f"ps/{pp}.{index}", members)

    @property
    def _inner(self) -> int:
        """Workers of a pipeline rank: pp is the outermost axis of a mesh."""
        return self.mesh.size // self.mesh.pp
