"""The assignment of ranks to actors when a run goes on in another layout, or with replacements of failed actors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from raypar.actors.mesh.world import World


class _Role(NamedTuple):
    """The role of a rank in a layout. Servers and expert actors belong to no replica.

    Attributes:
        pp: Its pipeline rank.
        dp: Its replica, as numbered in the previous layout; None for a server or expert actor.
        inner: Its number among the actors of its pipeline rank in that replica, or among servers and expert actors.
    """

    pp: int
    dp: int | None
    inner: int


def rank_assignment(before: World, after: World, present: Collection[int], spares: Iterable[int]) -> list[int]:
    """Choose the actor of each rank of a layout. Actors keep their roles if possible, so tensor groups stay together.

    If there are fewer replicas, the replicas with most actors present stay; actors of the others fill their gaps.

    Args:
        before: The ranks of the previous layout.
        after: The ranks of the next layout, which may have more or fewer replicas. Enough actors are present.
        present: The ranks of the previous layout whose actors are present.
        spares: Numbers of actors that had no rank.

    Returns:
        By rank, the previous rank of its actor, or the number of a spare.
    """
    ranks = sorted(present)
    by_rank = dict(zip(ranks, _roles(before, ranks), strict=True))
    found = Counter(role.dp for role in by_rank.values())
    fullest = sorted(range(before.mesh.dp), key=lambda dp: (-found[dp], dp))
    stays = dict(enumerate(sorted(fullest[: after.mesh.dp])))  # by replica, its number before
    by_role = {role: rank for rank, role in by_rank.items()}
    roles = _roles(after, range(after.size), stays)
    staying = {by_role[role] for role in roles if role in by_role}
    free = iter([*(rank for rank in ranks if rank not in staying), *spares])
    return [by_role[role] if role in by_role else next(free) for role in roles]


def _roles(world: World, ranks: Iterable[int], before: Mapping[int, int] | None = None) -> list[_Role]:
    """Return the roles of ranks.

    Args:
        world: The ranks of their layout.
        ranks: The ranks.
        before: By replica, its number in the previous layout; None if this is the previous layout.
    """
    beyond = Counter[int]()  # by pipeline rank, the number of servers and expert actors so far
    numbers = dict[int, int]()
    for rank in range(world.mesh.size, world.size):
        numbers[rank] = beyond[world.pp(rank)]
        beyond[world.pp(rank)] += 1
    found = list[_Role]()
    for rank in ranks:
        if rank in numbers:
            found.append(_Role(world.pp(rank), None, numbers[rank]))
        else:
            dp, inner = divmod(rank % world.mesh.inner, world.mesh.cp * world.mesh.tensor_ranks)
            found.append(_Role(world.pp(rank), dp if before is None else before.get(dp, -1), inner))
    return found
