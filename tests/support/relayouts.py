"""The actors of a run as threads, and then those of another layout of it, with the state that these hand over."""

from __future__ import annotations

from raypar.actors.relayout.handover import Handover
from raypar.actors.relayout.moves import moves_between
from raypar.actors.sharding import volume
from tests.support.local_groups import local_groups
from tests.support.team import Team
from tests.support.threads import in_threads


def bytes_between(moves, sizes):
    """The bytes that are sent between actors, given the bytes of an element of each tensor."""
    return sum(volume(move.box) * sizes[move.tensor] for move in moves if move.is_sent)


def relaid(team, run, seats=None):
    """The team of another layout, which goes on from the state of this one; and the moves, and the bytes of elements.

    Args:
        team: A team between two steps.
        run: The run in the other layout.
        seats: By rank of the other layout, the rank that its actor has had; numbers behind those are new actors.
    """
    after = Team.of(run)
    count = max(team.world.size, after.world.size)
    seats = list(range(after.world.size)) if seats is None else seats
    given = [Handover(actor.member.state.pieces(), actor.member.state.storage.accessible) for actor in team.all]
    given += [Handover() for _ in range(count - len(given))]
    kinds = {name: kind for one in given for name, kind in one.holding.kinds.items()}
    wanted = [{} for _ in range(count)]
    for rank, number in enumerate(seats):
        wanted[number] = given[number].want(after.all[rank].member.state.wanted_tensors(), kinds)
    sizes = {name: kind.itemsize for name, kind in kinds.items()}
    moves = moves_between([one.holding.boxes for one in given], wanted, sizes)
    groups = local_groups("relayout", count, 20.0)

    def passed(number):
        own = [move for move in moves if number in (move.source, move.destination)]
        given[number].pass_on(own, groups[number])

    in_threads(range(count), passed)
    after.each(lambda actor: actor.member.state.adopt(given[seats[after.all.index(actor)]].read) or True)
    sent = sum(entry.bytes for group in groups for (_, op), entry in group.ledger.entries().items() if op == "send")
    assert sent == bytes_between(moves, sizes), "what the ledger counts is what was planned"
    return after, moves, sizes
