"""The mesh: named axes, the coordinates of every actor, and the members of every group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from raypar.actors.bounds import Count
from raypar.actors.known_fields import known_fields
from raypar.actors.mesh.grid import Grid, GridSpelling, grid_of

Axis = Literal["pp", "dp", "cp", "tp", "ep", "edp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")


@known_fields()
@dataclass(frozen=True)
class Mesh:
    """How many ways each axis splits the work; ``pp * dp * cp * tp`` actors.

    Ranks count with tp innermost (neighbours on the fastest links), then cp, dp and pp.
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
    """expert groups, carved out of dp x cp x tp; not yet: a run must have 1"""

    def faults(self, right: Callable[..., bool]) -> Iterator[str]:
        """What is wrong with the axes; ``right`` tells of fields, by their paths in a run, whether they are sound."""
        if right("mesh.ep") and self.ep > 1:
            yield f"mesh.ep is {self.ep}, but expert parallelism does not compute yet: set it to 1"
        if self.shard is not None and right("mesh.dp", "mesh.cp", "mesh.shard") and self.dp * self.cp % self.shard:
            near = max(count for count in range(1, self.shard + 1) if self.dp * self.cp % count == 0)
            replicas = f"{self.dp * self.cp} replicas" + (" (dp x cp)" if self.cp > 1 else "")
            yield f"mesh.shard is {self.shard}, which does not divide the {replicas}: use {near}, say"

    @property
    def size(self) -> int:
        """Number of actors."""
        return self.pp * self.dp * self.cp * self.tensor_ranks

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
        """Number of replicas among which sharded weights are shared out."""
        return self.dp * self.cp if self.shard is None else self.shard

    def ways(self, axis: Axis) -> int:
        """Return how many ways an axis splits the work."""
        count: int = self.tensor_ranks if axis == "tp" else getattr(self, axis)
        return count

    def coordinate(self, rank: int) -> dict[Axis, int]:
        """Return a rank's position on each axis."""
        out: dict[Axis, int] = {}
        for axis in reversed(AXES):
            rank, out[axis] = divmod(rank, self.ways(axis))
        return {axis: out[axis] for axis in AXES}

    def rank(self, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank at a coordinate."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tensor_ranks + tp

    def label(self, rank: int) -> str:
        """Name a rank in messages: ``pp=1``, or ``pp=1 dp=0 tp=3`` if axes other than pp are split."""
        coordinate = self.coordinate(rank)
        return " ".join(f"{axis}={coordinate[axis]}" for axis in AXES if axis == "pp" or self.ways(axis) > 1)

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return the members of every group of an axis, each in the order of their position on it.

        Expert groups (``ep``) are runs of neighbouring ranks within a pipeline stage. ``edp`` groups join the ranks
        that hold the same experts.
        """
        inner = self.dp * self.cp * self.tensor_ranks
        if axis == "ep":
            return tuple(tuple(range(first, first + self.ep)) for first in range(0, self.size, self.ep))
        if axis == "edp":
            return tuple(
                tuple(range(stage * inner + first, (stage + 1) * inner, self.ep))
                for stage in range(self.pp)
                for first in range(self.ep)
            )
        stride = 1
        for inside in AXES[AXES.index(axis) + 1 :]:
            stride *= self.ways(inside)
        size = self.ways(axis)
        starts = (rank for rank in range(self.size) if self.coordinate(rank)[axis] == 0)
        return tuple(tuple(start + i * stride for i in range(size)) for start in starts)

    def replicas(self, rank: int) -> tuple[int, tuple[int, ...]]:
        """Return the group of ranks that hold the same weights as ``rank``: they differ from it on dp and cp only.

        Returns:
            The index of the group, and its members.
        """
        at = self.coordinate(rank)
        members = (self.rank(at["pp"], dp, cp, at["tp"]) for dp in range(self.dp) for cp in range(self.cp))
        return at["pp"] * self.tensor_ranks + at["tp"], tuple(members)

    def group_of(self, axis: Axis, rank: int) -> tuple[int, tuple[int, ...]]:
        """Return the group of an axis that contains ``rank``.

        Returns:
            The index of the group among the axis' groups, and its members.

        Raises:
            ValueError: The rank is outside the mesh.
        """
        for index, members in enumerate(self.groups(axis)):
            if rank in members:
                return index, members
        raise ValueError(f"rank {rank} is outside a mesh of {self.size} actors")
