"""Transfers of snapshots between actors, when a run on several nodes goes back to a snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from raypar.actors.checkpoint.snapshot_address import SnapshotOwner
from raypar.schedules.grouped import grouped

Steps = Sequence[Mapping[SnapshotOwner, Sequence[int]]]
"""by actor, the steps of its snapshots, by share: actors with a rank first, in the order of their ranks"""


class SnapshotTransfer(NamedTuple):
    """A snapshot that is sent from one actor to another.

    Attributes:
        share: The owner of the snapshot.
        giver: The number of an actor that has it.
        receiver: The rank of the actor that receives it for its whole node.
    """

    share: SnapshotOwner
    giver: int
    receiver: int


def transfers(
    nodes: Sequence[str], steps: Steps, needed: Sequence[Sequence[SnapshotOwner]], step: int
) -> Iterator[SnapshotTransfer]:
    """Yield the transfers with which every rank can go back to a step: each missing share once to each node.

    The work is spread: the ranks of a node receive in turn, and the owners of a share send it in turn.

    Args:
        nodes: By rank, the domain in which processes can open one another's snapshots; "" if not known.
        steps: The steps of the actors' snapshots.
        needed: By rank, the shares that it needs.
        step: Number of steps taken; at least one actor has each share of it.
    """
    givers, sent = _givers(steps, len(nodes), step), Counter[SnapshotOwner]()
    for ranks in grouped((node or f"rank {rank}", rank) for rank, node in enumerate(nodes)).values():
        lacked = dict.fromkeys(share for rank in ranks for share in _lacking(step, steps[rank], needed[rank]))
        for number, share in enumerate(lacked):
            having = givers[share]
            yield SnapshotTransfer(share, having[(share.rank + sent[share]) % len(having)], ranks[number % len(ranks)])
            sent[share] += 1


def has_all(steps: Steps, shares: Sequence[SnapshotOwner], step: int) -> bool:
    """Return whether every actor has the snapshots of all shares of a step."""
    return all(len(there) >= len(shares) and not any(_lacking(step, there, shares)) for there in steps)


def chosen_holders(
    steps: Steps, size: int, shares: Sequence[SnapshotOwner], step: int
) -> dict[int, list[SnapshotOwner]]:
    """Choose for each share an actor that has its snapshot of a step, so that all are chosen about equally often.

    Args:
        steps: The steps of the actors' snapshots.
        size: Number of actors with a rank.
        shares: The shares; at least one actor has each of them of this step.
        step: Number of steps taken.

    Returns:
        By chosen actor, its shares.
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
        steps: By actor, the steps of its snapshots, by share.
    """
    return grouped((share, actor) for actor, has in steps.items() for share, there in has.items() if step in there)


def _givers(steps: Steps, size: int, step: int) -> dict[SnapshotOwner, list[int]]:
    """Return by share the actors that send it: those with a rank that have it, or else spares."""
    holders = holders_of(step, dict(enumerate(steps)))
    return {share: [actor for actor in having if actor < size] or having for share, having in holders.items()}


def _lacking(
    step: int, there: Mapping[SnapshotOwner, Sequence[int]], shares: Sequence[SnapshotOwner]
) -> Iterator[SnapshotOwner]:
    """Yield the shares of which an actor lacks the snapshot of a step; ``there`` are its snapshots' steps by share."""
    return (share for share in shares if step not in there.get(share, ()))
