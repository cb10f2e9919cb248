"""The mesh: named axes, the coordinates of every actor, and the members of every group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from raypar.actors.bounds import Count, Some
from raypar.actors.known_fields import known_fields
from raypar.actors.mesh.grid import Grid, GridSpelling, grid_of

Axis = Literal["pp", "dp", "cp", "tp", "ep", "edp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")


@known_fields()
@dataclass(frozen=True)
class Mesh:
    """The size of each axis: ``pp * dp * cp * tp`` actors, and expert actors.

    Ranks are numbered with tp innermost (neighbours on the fastest links), then cp, dp and pp. Expert actors follow.
    """

    pp: Count = 1
    """pipeline ranks"""
    dp: Count = 1
    """data-parallel replicas"""
    cp: Count = 1
    """parts of the sequence"""
    tp: Count | GridSpelling = 1
    """shards of a layer: a number, or a grid: 2d:2x2, 2.5d:2x2x1 (a square, and its depth), 3d:2x2x2"""
    shard: Count | None = None
    """with zero, how many replicas (of dp x cp), those of a node, say, share out weights among them; each group of so
    many replicas has a copy of all weights (hybrid sharding). None: all replicas"""
    ep: Count = 1
    """parts into which the experts of each layer are divided, over ranks of dp x cp x tp; 1: every replica has all"""
    etp: Count | None = None
    """tensor ranks of one expert: tp, or 1, with which tensor ranks divide tokens instead; None: tp where ep is 1"""
    rank_dp: tuple[Count, ...] = ()
    """replicas of each pipeline rank, as (2, 3, 1), where these are not as many: the microbatches of a step go to them
    in turn, microbatch k to replica k mod r (PipeDream's 1F1B-RR); with it dp is 1"""
    rank_tp: tuple[Count, ...] = ()
    """shards of a layer on each pipeline rank, as (2, 1), where these are not as many; with it tp is 1"""
    expert_actors: Some = 0
    """with each pipeline rank, so many more actors that hold its experts and nothing else; 0: ranks hold experts too"""

    def faults(self, right: Callable[..., bool]) -> Iterator[str]:
        """Yield the faults of the axes; ``right`` returns whether all fields with these paths in a run are valid."""
        if right("mesh.dp", "mesh.cp", "mesh.tp", "mesh.ep", "mesh.etp", "mesh.expert_actors", "mesh.shard"):
            yield from self._expert_faults()
        if self.shard is not None and right("mesh.dp", "mesh.cp", "mesh.shard") and self.dp * self.cp % self.shard:
            near = max(count for count in range(1, self.shard + 1) if self.dp * self.cp % count == 0)
            replicas = "1 replica" if self.dp * self.cp == 1 else f"{self.dp * self.cp} replicas"
            yield f"mesh.shard is {self.shard}, which does not divide {replicas} (dp x cp): set it to {near}, say"

    def count_faults(self) -> Iterator[tuple[str, str]]:
        """Yield (field, fault) for each field whose count of numbers is not the number of pipeline ranks.

        Other faults of a mesh can only be found if there are none of these.
        """
        for axis, counts in (("dp", self.rank_dp), ("tp", self.rank_tp)):
            if counts and len(counts) != self.pp:
                given = "1 pipeline rank" if self.pp == 1 else f"{self.pp} pipeline ranks"
                fix = f"give one number for each, or set mesh.pp to {len(counts)}"
                yield f"mesh.rank_{axis}", f"mesh.rank_{axis} is {counts}, for {given} (mesh.pp): {fix}"

    def _expert_faults(self) -> Iterator[str]:
        """Yield the reasons why experts cannot be divided over the ranks of a pipeline stage, or over own actors."""
        if self.expert_actors:
            if self.etp is not None and self.etp > 1:
                yield (
                    f"mesh.expert_actors is {self.expert_actors}, and mesh.etp is {self.etp}: an expert is whole on "
                    "its actor: leave mesh.etp out"
                )
            return
        if self.ep == 1:
            if self.etp not in (None, self.tensor_ranks):
                fix = f", or set mesh.ep to {self.tensor_ranks}" if self.grid is None and self.tensor_ranks > 1 else ""
                yield (
                    f"mesh.etp is {self.etp}, but with mesh.ep 1 an expert has all {self.tensor_ranks} tensor ranks: "
                    f"leave mesh.etp out{fix}"
                )
            return
        if self.etp is not None and self.etp not in (1, self.tensor_ranks):
            yield f"mesh.etp is {self.etp}: an expert has all {self.tensor_ranks} tensor ranks or one: use one of these"
            return
        if self.grid is None and self.inner % (self.ep * self.expert_ranks):
            most = self.inner // self.expert_ranks
            near = max(count for count in range(1, self.ep + 1) if most % count == 0)
            what = "dp x cp" if self.expert_ranks > 1 or self.tensor_ranks == 1 else "dp x cp x tp"
            yield f"mesh.ep is {self.ep}, which does not divide {what} = {most}: use {near}, say"
        elif self.dp * self.cp == 1 and self.ep < self.inner:
            yield (
                f"mesh.ep is {self.ep}, so tensor ranks have the same experts, and no replicas sum "
                f"their gradients: use {self.inner}, or set mesh.dp to 2"
            )

    @property
    def inner(self) -> int:
        """Number of actors of one pipeline rank, without expert actors, if all pipeline ranks have as many."""
        return self.dp * self.cp * self.tensor_ranks

    @property
    def is_uneven(self) -> bool:
        """Whether replicas or tensor ranks are given for each pipeline rank; then all actors are one ``pp`` group."""
        return bool(self.rank_dp or self.rank_tp)

    def dp_of(self, pp: int) -> int:
        """Return the number of replicas of a pipeline rank."""
        return self.rank_dp[pp] if self.rank_dp else self.dp

    def tp_of(self, pp: int) -> int:
        """Return the number of tensor ranks of a pipeline rank."""
        return self.rank_tp[pp] if self.rank_tp else self.tensor_ranks

    def ranks_of(self, pp: int) -> range:
        """Return the ranks of a pipeline rank, without expert actors."""
        if not self.is_uneven:
            return range(pp * self.inner, (pp + 1) * self.inner)
        first = sum(self.dp_of(before) * self.tp_of(before) for before in range(pp))
        return range(first, first + self.dp_of(pp) * self.tp_of(pp))

    @property
    def expert_ranks(self) -> int:
        """Number of tensor ranks over which each expert is divided."""
        if self.etp is not None:
            return self.etp
        return 1 if self.divides_experts else self.tensor_ranks

    @property
    def divides_experts(self) -> bool:
        """Whether actors have different experts of a layer, to which tokens are sent."""
        return self.ep > 1 or self.expert_actors > 0

    @property
    def expert_parts(self) -> int:
        """Number of parts into which the experts of each layer are divided."""
        return self.expert_actors or self.ep

    @property
    def folds_experts(self) -> bool:
        """Whether the tensor ranks of a layer have different experts, or replicas of them, and divide its tokens."""
        return self.divides_experts and self.expert_ranks < self.tensor_ranks

    def held_experts(self, count: int) -> int:
        """Return the number of a layer's ``count`` experts that a rank holds; 0 if there are expert actors."""
        return 0 if self.expert_actors else count // self.ep

    @property
    def size(self) -> int:
        """Number of ranks with a coordinate on each axis: all actors except expert actors."""
        return self.ranks_of(self.pp - 1).stop

    @property
    def actors(self) -> int:
        """Number of actors that train: ranks and expert actors."""
        return self.size + self.pp * self.expert_actors

    @property
    def grid(self) -> Grid | None:
        """The grid of the tensor ranks; None if ``tp`` is a number."""
        return grid_of(self.tp) if isinstance(self.tp, str) else None

    @property
    def tensor_ranks(self) -> int:
        """Number of tensor ranks."""
        return grid_of(self.tp).size if isinstance(self.tp, str) else self.tp

    @property
    def shards(self) -> int:
        """Number of replicas among which weights are sharded."""
        return self.dp * self.cp if self.shard is None else self.shard

    def ways(self, axis: Axis) -> int:
        """Return the size of an axis; if pipeline ranks differ, the largest one."""
        if axis in ("dp", "tp") and self.is_uneven:
            return max(self.dp_of(pp) if axis == "dp" else self.tp_of(pp) for pp in range(self.pp))
        count: int = self.tensor_ranks if axis == "tp" else getattr(self, axis)
        return count

    def spelled(self, axis: Axis) -> str:
        """Return the size of an axis as a user spells it: 4, a grid, or 2-3-1 by pipeline rank."""
        counts = {"dp": self.rank_dp, "tp": self.rank_tp}.get(axis)
        return "-".join(map(str, counts)) if counts else str(getattr(self, axis))

    def coordinate(self, rank: int) -> dict[Axis, int]:
        """Return a rank's position on each axis."""
        if self.is_uneven:
            pp = next(pp for pp in range(self.pp) if rank in self.ranks_of(pp))
            dp, tp = divmod(rank - self.ranks_of(pp).start, self.tp_of(pp))
            return {"pp": pp, "dp": dp, "cp": 0, "tp": tp}
        out: dict[Axis, int] = {}
        for axis in reversed(AXES):
            rank, out[axis] = divmod(rank, self.ways(axis))
        return {axis: out[axis] for axis in AXES}

    def rank(self, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank at a coordinate."""
        if self.is_uneven:
            return self.ranks_of(pp).start + dp * self.tp_of(pp) + tp
        return ((pp * self.dp + dp) * self.cp + cp) * self.tensor_ranks + tp

    def label(self, rank: int) -> str:
        """Name a rank in messages: ``pp=1``, ``pp=1 dp=0 tp=3`` if axes other than pp are split, ``pp=1 expert=0``."""
        if rank >= self.size:
            pp, expert = divmod(rank - self.size, self.expert_actors)
            return f"pp={pp} expert={expert}"
        coordinate = self.coordinate(rank)
        ways = {"pp": 2, "dp": self.dp_of(coordinate["pp"]), "cp": self.cp, "tp": self.tp_of(coordinate["pp"])}
        return " ".join(f"{axis}={coordinate[axis]}" for axis in AXES if ways[axis] > 1)

    def experts_of(self, pp: int) -> range:
        """Return the ranks of the expert actors of a pipeline rank."""
        first = self.size + pp * self.expert_actors
        return range(first, first + self.expert_actors)

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return the members of every group of an axis, each in the order of their position on it.

        Expert groups (``ep``) are neighbours within a pipeline rank, which have different experts (the same tensor rank
        of each). ``edp`` groups have the ranks that hold the same part of the same experts. With expert actors, an
        expert group has all ranks of a pipeline rank and then its expert actors, each of which is alone in its ``edp``.
        """
        if axis == "edp" and self.expert_actors:
            return tuple((rank,) for rank in range(self.size, self.actors))
        found = defaultdict[tuple[int, ...], list[int]](list)
        for rank in range(self.actors if axis == "ep" else self.size):
            found[self._in_common(axis, rank)].append(rank)
        return tuple(map(tuple, found.values()))

    def _in_common(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return numbers that the members of a rank's group have in common, and no ranks of other groups.

        If pipeline ranks have different numbers of actors, all are one group along pp, and experts are not divided: so
        each rank is alone along ep, and along edp with its replicas.
        """
        if self.is_uneven and axis in ("pp", "ep"):
            return (rank,) if axis == "ep" else ()
        if axis == "ep" and self.expert_actors:
            return (rank // self.inner if rank < self.size else (rank - self.size) // self.expert_actors,)
        if axis in ("ep", "edp") and not self.is_uneven:
            step = self.ep * self.expert_ranks
            return (rank // step, rank % self.expert_ranks) if axis == "ep" else (rank // self.inner, rank % step)
        same = "dp" if axis == "edp" else axis
        return tuple(at for other, at in self.coordinate(rank).items() if other != same)

    def replicas(self, rank: int) -> tuple[int, tuple[int, ...]]:
        """Return the group of ranks that hold the same weights as ``rank``: they differ from it on dp and cp only.

        Returns:
            The index of the group, and its members.
        """
        at = self.coordinate(rank)
        if self.is_uneven:
            return self.group_of("dp", rank)
        members = (self.rank(at["pp"], dp, cp, at["tp"]) for dp in range(self.dp) for cp in range(self.cp))
        return at["pp"] * self.tensor_ranks + at["tp"], tuple(members)

    def group_of(self, axis: Axis, rank: int) -> tuple[int, tuple[int, ...]]:
        """Return the group of an axis that contains ``rank``.

        Returns:
            The index of the group among the axis' groups, and its members.

        Raises:
            ValueError: The rank is outside the mesh.
        """
        found = _by_rank(self, axis).get(rank)
        if found is None:
            raise ValueError(f"rank {rank} is outside a mesh of {self.size} actors")
        return found


@lru_cache(maxsize=64)
def _by_rank(mesh: Mesh, axis: Axis) -> Mapping[int, tuple[int, tuple[int, ...]]]:
    """Return the index and the members of the group of each rank on an axis, cached."""
    return {rank: (index, members) for index, members in enumerate(mesh.groups(axis)) for rank in members}
