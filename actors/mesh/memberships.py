"""The groups that the ranks of a run form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from raypar.actors.mesh.mesh import AXES
from raypar.actors.mesh.world import World


class Membership(NamedTuple):
    """One rank's membership in a group.

    Attributes:
        key: The group's name among those of this rank: ``pp``, ``dp`` (all ranks with the same weights, including those
            along cp), ``shard`` (the replicas among which weights are sharded), ``replicate`` (those that own the same
            weights), ``gather`` (the members of ``shard`` or ``dp`` again, for weights, which have another order than
            gradients), ``cp``, ``tp``, ``tp.row`` (and other lines of a grid), ``ep`` (ranks with different experts),
            ``edp`` (all ranks with the same experts), ``edp.gather`` (as ``gather``, for experts), ``mesh`` (all
            workers that together update one model, or one tensor rank's part of it), ``ps0`` (replicas and a parameter
            server) or ``servers``.
        axis: Axis of the group's bytes in the ledger.
        name: Unique in the run.
        members: Ranks, in the order of the group.
    """

    key: str
    axis: str
    name: str
    members: tuple[int, ...]


def memberships(world: World, rank: int) -> Iterator[Membership]:
    """Yield a rank's groups in the order in which to join them, which prevents deadlock between ranks.

    Args:
        world: All ranks.
        rank: One of them.
    """
    pp = world.pp(rank)
    if rank < world.mesh.size:
        for axis in AXES:
            index, members = world.mesh.replicas(rank) if axis == "dp" else world.mesh.group_of(axis, rank)
            # With servers, replicas do not communicate with each other.
            if len(members) > 1 and not (axis == "dp" and world.servers):
                yield Membership(axis, axis, f"{axis}/{index}", members)
            if axis == "dp" and world.sharded:
                yield from _shard_groups(world, rank, index, members)
        if world.mesh.divides_experts:
            yield from _expert_groups(world, rank)
        tp = world.mesh.tensor_ranks
        if world.mesh.grid is not None:
            for line, offsets in world.mesh.grid.lines(rank % tp):
                members = tuple(rank - rank % tp + offset for offset in offsets)
                yield Membership(f"tp.{line}", f"tp.{line}", f"tp.{line}/{members[0]}", members)
        if world.updaters == "mesh":
            yield _updaters(world, rank)
        for index in range(world.servers):
            yield _served(world, pp, index)
    elif world.is_expert(rank):
        yield from _expert_groups(world, rank)
        yield _updaters(world, rank)
    else:
        yield _served(world, pp, world.server_index(rank))
        if len(world.server_ranks) > 1:
            yield Membership("servers", "servers", "servers/0", tuple(world.server_ranks))


def _shard_groups(world: World, rank: int, index: int, replicas: tuple[int, ...]) -> Iterator[Membership]:
    """Yield a worker's groups for sharded weights.

    Args:
        world: All ranks.
        rank: The worker.
        index: Index of its group of replicas.
        replicas: The members of that group.
    """
    shards = world.mesh.shards
    copy, own = divmod(replicas.index(rank), shards)
    members, axis = replicas[copy * shards : (copy + 1) * shards], world.shard_key
    first = index * (len(replicas) // shards) + copy
    if world.hybrid:
        yield Membership("shard", "shard", f"shard/{first}", members)
        yield Membership("replicate", "replicate", f"replicate/{index * shards + own}", replicas[own::shards])
    if world.gathers:
        yield Membership("gather", axis, f"gather/{first}", members)


def _updaters(world: World, rank: int) -> Membership:
    """Return the group of all ranks that update one model, or a tensor rank's part of it, if no other group has them.

    If tensor ranks have different experts, or there are expert actors, all of them have one gradient norm.
    """
    copy, stride = world.copy_of(rank), 1 if world.mesh.folds_experts else world.mesh.tensor_ranks
    ranks = range(rank % stride, world.mesh.actors, stride)
    members = tuple(one for one in ranks if world.copy_of(one) == copy)
    return Membership("mesh", "mesh", f"mesh/{copy * stride + rank % stride}", members)


def _expert_groups(world: World, rank: int) -> Iterator[Membership]:
    """Yield the groups of a worker or expert actor for experts that are divided over actors."""
    index, members = world.mesh.group_of("ep", rank)
    yield Membership("ep", "ep", f"ep/{index}", members)
    if world.mesh.expert_actors:
        return
    index, members = world.mesh.group_of("edp", rank)
    if len(members) > 1:
        yield Membership("edp", "edp", f"edp/{index}", members)
        if world.gathers:
            yield Membership("edp.gather", "edp", f"edp.gather/{index}", members)


def _served(world: World, pp: int, index: int) -> Membership:
    """Return the group of a pipeline rank's replicas and one of its servers, which is the last member."""
    members = (*world.replicas_of(pp), world.server_rank(pp, index))
    return Membership(f"ps{index}", "ps", f"ps/{pp}.{index}", members)
