"""Who takes which rank when a run goes on in another layout, or with others in the place of those that failed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from raypar.actors.mesh.world import World


class _Role(NamedTuple):
    """What a rank is in a layout. Servers and expert actors are of no replica.

    Attributes:
        pp: Its pipeline rank.
        dp: Its replica, as the layout before counts it; None for a server or expert actor.
        inner: Its number among the actors of that replica, or of the others, of its pipeline rank.
    """

    pp: int
    dp: int | None
    inner: int


def seats_of(before: World, after: World, present: Collection[int], others: Iterable[int]) -> list[int]:
    """Choose who takes each rank of a layout. Whoever can stay where he is does, and so tensor groups stay together.

    Of fewer replicas, those stay of which most actors are there; their gaps are filled with actors of the others.

    Args:
        before: The ranks of the layout before.
        after: Those of the layout to come, with as many replicas, or more, or fewer. At least as many actors are there.
        present: Of the ranks before, those whose actors are there.
        others: Numbers of actors that had no rank.

    Returns:
        By rank, the rank before of the actor that takes it, or the number of another one.
    """
    there = sorted(present)
    found = [sum(_role(before, rank).dp == dp for rank in there) for dp in range(before.mesh.dp)]
    fullest = sorted(range(before.mesh.dp), key=lambda dp: (-found[dp], dp))
    stays = dict(enumerate(sorted(fullest[: after.mesh.dp])))  # by replica, its number before
    by_role = {_role(before, rank): rank for rank in there}
    roles = [_role(after, rank, stays) for rank in range(after.size)]
    staying = {by_role[role] for role in roles if role in by_role}
    free = iter([*(rank for rank in there if rank not in staying), *others])
    return [by_role[role] if role in by_role else next(free) for role in roles]


def _role(world: World, rank: int, before: Mapping[int, int] | None = None) -> _Role:
    """Return what a rank is.

    Args:
        world: The ranks of its layout.
        rank: The rank.
        before: By replica, its number in the layout before; None if this is the layout before.
    """
    pp = world.pp(rank)
    if rank >= world.mesh.size:
        return _Role(pp, None, sum(world.pp(one) == pp for one in range(world.mesh.size, rank)))
    dp, inner = divmod(rank % world.mesh.inner, world.mesh.cp * world.mesh.tensor_ranks)
    return _Role(pp, dp if before is None else before.get(dp, -1), inner)
