"""Which snapshots are sent from which actor to which, when a run goes back to them on several nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from raypar.actors.checkpoint.snapshot_address import Share


class Transfer(NamedTuple):
    """A snapshot that goes from one actor to another.

    Attributes:
        share: Whose snapshot it is.
        giver: The number of an actor that has it.
        receiver: The rank of the actor that receives it for all of its node.
    """

    share: Share
    giver: int
    receiver: int


def transfers(
    nodes: Sequence[str], steps: Sequence[Mapping[Share, Sequence[int]]], shares: Sequence[Share], step: int
) -> Iterator[Transfer]:
    """Yield what is sent so that every rank can go back to a step: each share once to each node that lacks it.

    The work is spread: the ranks of a node receive in turn, and those that have a share send it in turn.

    Args:
        nodes: By rank, what processes have in common that can open one another's snapshots; "" if it is not known.
        steps: By actor, the steps of which it has snapshots: by rank first, then those without a rank.
        shares: All shares of the state.
        step: Number of steps taken; somebody has each share of it.
    """
    holders, ranks_on = holders_of(step, dict(enumerate(steps))), dict[str, list[int]]()
    for rank, node in enumerate(nodes):
        ranks_on.setdefault(node or f"rank {rank}", []).append(rank)
    for number, share in enumerate(shares):
        having = holders[share]
        lacking = [ranks for ranks in ranks_on.values() if not {*ranks} <= {*having}]
        for turn, ranks in enumerate(lacking, number):
            yield Transfer(share, having[turn % len(having)], ranks[number % len(ranks)])


def holders_of(step: int, steps: Mapping[int, Mapping[Share, Sequence[int]]]) -> dict[Share, list[int]]:
    """Return by share the actors that have its snapshot of a step.

    Args:
        step: Number of steps taken.
        steps: By actor, the steps of which it has snapshots, by share.
    """
    found = dict[Share, list[int]]()
    for actor, has in steps.items():
        for share, there in has.items():
            if step in there:
                found.setdefault(share, []).append(actor)
    return found
