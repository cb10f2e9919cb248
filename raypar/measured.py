"""What the actors did in a step, as timelines on one clock, and what they have moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypar.actors.ledger import Entry
from raypar.actors.plan import Span
from raypar.actors.world import World
from raypar.schedules.schedule import Schedule
from raypar.schedules.timeline import Event, Timeline

Moved = Mapping[tuple[str, str], tuple[int, int]]  # by (axis, op): calls and bytes


def timelines_of(schedule: Schedule, world: World, rows: Sequence[Sequence[Span]]) -> list[Timeline]:
    """A timeline for each replica, then one for the servers 0, the servers 1, ... of all pipeline ranks.

    ``schedule`` is as it was performed, and ``rows`` are the spans of every rank. The first of all is at second 0.
    """
    zero = min((span.start for row in rows for span in row), default=0.0)
    lanes = [world.replica(dp) for dp in range(world.mesh.dp)]
    lanes += [tuple(world.server_rank(pp, index) for pp in range(world.mesh.pp)) for index in range(world.servers)]
    return [_timeline(schedule, world, zero, {rank: rows[rank] for rank in lane}) for lane in lanes]


def ledger_of(world: World, moved: Sequence[Moved]) -> dict[str, dict[tuple[str, str], Entry]]:
    """Calls and bytes by (axis, op) of every actor, by its name; ``moved`` are those of every rank."""
    return {
        world.label(rank): {key: Entry(*counts) for key, counts in table.items()} for rank, table in enumerate(moved)
    }


def _timeline(schedule: Schedule, world: World, zero: float, rows: dict[int, Sequence[Span]]) -> Timeline:
    events = [
        Event(world.pp(rank), world.label(rank), action, start - zero, end - zero, nbytes, bucket)
        for rank, row in rows.items()
        for action, start, end, nbytes, bucket in row
    ]
    return Timeline(schedule, tuple(sorted(events, key=lambda event: event.start)), measured=True)
