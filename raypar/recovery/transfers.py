"""Which snapshots are sent from which actor to which, when a run goes back to them on several nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from raypar.actors.checkpoint.snapshot_address import SnapshotOwner

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
