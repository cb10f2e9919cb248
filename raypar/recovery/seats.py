"""Who takes which rank when a run goes on in another layout, or with others in the place of those that failed."""

from __future__ import annotations

from collections import Counter
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


def rank_assignment(before: World, after: World, present: Collection[int], others: Iterable[int]) -> list[int]:
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
    by_rank = dict(zip(there, _roles(before, there), strict=True))
    found = Counter(role.dp for role in by_rank.values())
    fullest = sorted(range(before.mesh.dp), key=lambda dp: (-found[dp], dp))
    stays = dict(enumerate(sorted(fullest[: after.mesh.dp])))  # by replica, its number before
    by_role = {role: rank for rank, role in by_rank.items()}
    roles = _roles(after, range(after.size), stays)
    staying = {by_role[role] for role in roles if role in by_role}
    free = iter([*(rank for rank in there if rank not in staying), *others])
    return [by_role[role] if role in by_role else next(free) for role in roles]


def _roles(world: World, ranks: Iterable[int], before: Mapping[int, int] | None = None) -> list[_Role]:
    """Return what ranks are.

    Args:
        world: The ranks of their layout.
        ranks: The ranks.
        before: By replica, its number in the layout before; None if this is the layout before.
    """
    beyond = Counter[int]()  # by pipeline rank, how many servers and expert actors come before
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
