"""The boundaries between pipeline ranks: the senders and receivers of each message."""

from __future__ import annotations

from itertools import pairwise

from raypar.actors.mesh.world import World
from raypar.schedules.action import RECVS, SENDS, Action
from raypar.schedules.rules import crosses, partner, rank_of
from raypar.schedules.schedule import Schedule


def peers_of(world: World, rank: int, action: Action, schedule: Schedule) -> tuple[int, ...]:
    """Return the receivers of an actor's SEND, or the sender of its RECV, as members of its ``pp`` group.

    All tensor ranks of a stage have its whole outputs and whole gradients. Where the other stage has fewer tensor
    ranks, some of them send nothing; where it has more, one sends to several. Of n senders and m receivers,
    receiver j gets its values from sender j n // m.

    Args:
        world: The ranks of the run.
        rank: The actor.
        action: The action; only a SEND or RECV has peers.
        schedule: The lowered schedule.
    """
    if action.op not in SENDS and action.op not in RECVS:
        return ()
    other = rank_of(partner(action), schedule)
    if not world.mesh.is_uneven:
        return (other,)
    here, there = world.trainers_in(world.row(rank)), world.trainers_in(other)
    own = here.index(rank)
    if action.op in RECVS:
        return (there[own * len(there) // len(here)],)
    return tuple(peer for index, peer in enumerate(there) if index * len(here) // len(there) == own)


def neighbours(world: World, schedule: Schedule) -> set[tuple[int, int]]:
    """Return all pairs of members of the ``pp`` group that exchange values, each in both directions.

    Args:
        world: The ranks of the run.
        schedule: Its schedule of training steps.
    """
    placement, every = schedule.placement, {*pairwise(range(schedule.num_stages)), *schedule.skips}
    pairs = {(placement[one], placement[other]) for one, other in every if crosses(one, other, schedule)}
    if world.mesh.is_uneven:
        ranks = world.mesh.ranks_of
        pairs = {(one, other) for here, there in pairs for one in ranks(here) for other in ranks(there) if one != other}
    return pairs | {(there, here) for here, there in pairs}
