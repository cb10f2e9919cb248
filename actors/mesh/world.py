"""The ranks of a run (workers of the mesh, then parameter servers) and the groups that they form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from raypar.actors.mesh.mesh import AXES, Mesh

DataParallel = Literal["all_reduce", "parameter_server"]
Zero = Literal[0, 1]


class Membership(NamedTuple):
    """One rank's membership in a group.

    Attributes:
        key: The group's name among those of this rank: ``pp``, ``dp`` (all ranks with the same weights, including those
            along cp), ``cp``, ``tp``, ``tp.row`` (and other lines of a grid), ``mesh`` (all workers, or all with one tp
            coordinate), ``ps0`` (replicas and a parameter server) or ``servers``.
        axis: Axis under which the ledger counts the group's bytes.
        name: Unique in the run.
        members: Ranks, in the order of the group.
    """

    key: str
    axis: str
    name: str
    members: tuple[int, ...]


@dataclass(frozen=True)
class World:
    """All ranks of a run: ``mesh.size`` workers, then the servers of pipeline rank 0, of pipeline rank 1, and so on.

    Attributes:
        mesh: The mesh of the workers.
        servers: Parameter servers per pipeline rank; 0 for none.
        sharded: Whether each replica owns a part of the weights for the update (ZeRO-1).
    """

    mesh: Mesh
    servers: int = 0
    sharded: bool = False

    @classmethod
    def of(cls, mesh: Mesh, data_parallel: DataParallel, servers: int, zero: Zero | None) -> World:
        """Create the world of a run. Replicas share the update unless ``zero`` is 0."""
        if data_parallel == "parameter_server":
            return cls(mesh, servers)
        return cls(mesh, sharded=zero != 0 and mesh.dp * mesh.cp > 1)

    @property
    def size(self) -> int:
        """Number of actors."""
        return self.mesh.size + self.mesh.pp * self.servers

    @property
    def replicas(self) -> int:
        """Number of actors with the same weights: dp x cp, as context ranks train them on parts of a sequence."""
        return self.mesh.dp * self.mesh.cp

    @property
    def reduces(self) -> bool:
        """Whether gradients must be summed over replicas or sent to servers."""
        return self.replicas > 1 or self.servers > 0

    @property
    def owners(self) -> int:
        """Number of actors (servers or replicas) among which the update of a pipeline rank's weights is divided."""
        return self.servers or (self.replicas if self.sharded else 1)

    @property
    def updaters(self) -> str:
        """The key of the group of all ranks that update parts of one model, or of one tensor rank's part of it."""
        if self.servers:
            return "servers"
        if not self.sharded:
            return "pp"
        return "mesh" if self.mesh.pp > 1 else "dp"

    def owner_rank(self, pp: int, owner: int) -> int:
        """Return the rank, within the group of all updaters, of one owner of a pipeline rank."""
        return pp * self.owners + owner

    @property
    def server_ranks(self) -> range:
        """The ranks of the parameter servers, which follow those of the mesh."""
        return range(self.mesh.size, self.size)

    def label(self, rank: int) -> str:
        """Name a rank in messages: ``pp=1``, ``pp=1 dp=0``, ``server 0 of pp=1``."""
        if rank < self.mesh.size:
            return self.mesh.label(rank)
        return f"server {self.server_index(rank)} of pp={self.pp(rank)}"

    def pp(self, rank: int) -> int:
        """Return the pipeline rank of a rank."""
        if rank < self.mesh.size:
            return rank // self._inner
        return (rank - self.mesh.size) // self.servers

    def leads(self, rank: int) -> bool:
        """Return whether a rank reports for its tensor group, whose ranks all have the same to report.

        Servers always do.
        """
        return rank >= self.mesh.size or self.mesh.coordinate(rank)["tp"] == 0

    def server_index(self, rank: int) -> int:
        """Return a server's index among those of its pipeline rank."""
        return (rank - self.mesh.size) % self.servers

    def server_rank(self, pp: int, index: int) -> int:
        """Return the rank of a server of a pipeline rank."""
        return self.mesh.size + pp * self.servers + index

    def replica(self, dp: int) -> tuple[int, ...]:
        """Return the workers of one data-parallel replica by pipeline rank.

        Of each tensor or context group, the first.
        """
        return tuple(self.mesh.rank(pp=pp, dp=dp) for pp in range(self.mesh.pp))

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """Return the members of a worker's tensor group. If the worker is the first tensor rank, it comes first."""
        return self.mesh.group_of("tp", rank)[1]

    def replicas_of(self, pp: int) -> range:
        """Return the workers of one pipeline rank, in rank order."""
        return range(pp * self._inner, (pp + 1) * self._inner)

    def memberships(self, rank: int) -> Iterator[Membership]:
        """Yield a rank's groups in the order in which to join them, which prevents deadlock between ranks."""
        pp = self.pp(rank)
        if rank < self.mesh.size:
            for axis in AXES:
                index, members = self.mesh.replicas(rank) if axis == "dp" else self.mesh.group_of(axis, rank)
                # With servers, replicas do not talk to each other.
                if len(members) > 1 and not (axis == "dp" and self.servers):
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
        """Return the group of a pipeline rank's replicas and one of its servers, which is the last member."""
        members = (*self.replicas_of(pp), self.server_rank(pp, index))
        return Membership(f"ps{index}", "ps", f"ps/{pp}.{index}", members)

    @property
    def _inner(self) -> int:
        """Number of workers per pipeline rank; pp is the mesh's outermost axis."""
        return self.mesh.size // self.mesh.pp
