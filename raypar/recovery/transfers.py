"""Which snapshots are sent from which actor to which, when a run goes back to them on several nodes.

Who takes which rank when a run goes on in another layout, or with others in the place of those that failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from raypar.actors.checkpoint.snapshot_address import SnapshotOwner
from raypar.actors.mesh.world import World

Steps = Sequence[Mapping[SnapshotOwner, Sequence[int]]]


"""by actor, the steps of which it has snapshots, by share: those with a rank first, in the order of their ranks"""


class SnapshotTransfer(NamedTuple):
    """A snapshot that goes from one actor to another.

    Attributes:
        share: Whose snapshot it is.
        giver: The number of an actor that has it.
        receiver: The rank of the actor that receives it for all of its node.
    """

    share: SnapshotOwner
    giver: int
    receiver: int


def transfers(
    nodes: Sequence[str], steps: Steps, needed: Sequence[Sequence[SnapshotOwner]], step: int
) -> Iterator[SnapshotTransfer]:
    """Yield what is sent so that every rank can go back to a step: to each node once what its ranks need and lack.

    The work is spread: the ranks of a node receive in turn, and those that have a share send it in turn.

    Args:
        nodes: By rank, what processes have in common that can open one another's snapshots; "" if it is not known.
        steps: The steps of which actors have snapshots.
        needed: By rank, the shares that it needs.
        step: Number of steps taken; somebody has each share of it.
    """
    givers, sent, ranks_on = _givers(steps, len(nodes), step), Counter[SnapshotOwner](), dict[str, list[int]]()
    for rank, node in enumerate(nodes):
        ranks_on.setdefault(node or f"rank {rank}", []).append(rank)
    for ranks in ranks_on.values():
        lacked = dict.fromkeys(share for rank in ranks for share in _lacking(step, steps[rank], needed[rank]))
        for number, share in enumerate(lacked):
            having = givers[share]
            yield SnapshotTransfer(share, having[(share.rank + sent[share]) % len(having)], ranks[number % len(ranks)])
            sent[share] += 1


def has_all(steps: Steps, shares: Sequence[SnapshotOwner], step: int) -> bool:
    """Return whether each of some actors has the snapshots of a step of all shares."""
    return all(len(there) >= len(shares) and not any(_lacking(step, there, shares)) for there in steps)


def chosen_holders(
    steps: Steps, size: int, shares: Sequence[SnapshotOwner], step: int
) -> dict[int, list[SnapshotOwner]]:
    """Choose for each share one of the actors that have its snapshot of a step, so that all are chosen about as often.

    Args:
        steps: The steps of which actors have snapshots.
        size: Number of actors with a rank.
        shares: The shares; somebody has each of them of this step.
        step: Number of steps taken.

    Returns:
        By actor, the shares for which it is chosen; only those that are chosen.
    """
    givers, chosen = _givers(steps, size, step), dict[int, list[SnapshotOwner]]()
    for share in shares:
        holder = min(givers[share], key=lambda actor: len(chosen.get(actor, ())))
        chosen.setdefault(holder, []).append(share)
    return chosen


def holders_of(step: int, steps: Mapping[int, Mapping[SnapshotOwner, Sequence[int]]]) -> dict[SnapshotOwner, list[int]]:
    """Return by share the actors that have its snapshot of a step.

    Args:
        step: Number of steps taken.
        steps: By actor, the steps of which it has snapshots, by share.
    """
    found = dict[SnapshotOwner, list[int]]()
    for actor, has in steps.items():
        for share, there in has.items():
            if step in there:
                found.setdefault(share, []).append(actor)
    return found


def _givers(steps: Steps, size: int, step: int) -> dict[SnapshotOwner, list[int]]:
    """Return by share the actors from which others get it: those with a rank that have it, or else others."""
    holders = holders_of(step, dict(enumerate(steps)))
    return {share: [actor for actor in having if actor < size] or having for share, having in holders.items()}


def _lacking(
    step: int, there: Mapping[SnapshotOwner, Sequence[int]], shares: Sequence[SnapshotOwner]
) -> Iterator[SnapshotOwner]:
    """Yield the shares of which an actor has no snapshot of a step, given by share the steps of those that it has."""
    return (share for share in shares if step not in there.get(share, ()))


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
