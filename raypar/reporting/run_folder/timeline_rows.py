"""A timeline as plain rows, as files of a run folder have it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

from pydantic import FailFast

from raypar.reporting.run_folder.damage import MOST_FAULTS, DamagedError
from raypar.reporting.run_folder.metrics_line import Figure, Number
from raypar.schedules.action import Action, Op
from raypar.schedules.schedule import Schedule
from raypar.schedules.timeline import Call, Event, Timeline


class EventRow(NamedTuple):
    """An event: its actor, its action, and its times in seconds. An older raypar wrote no calls."""

    rank: Number
    actor: str
    action: str
    start: Figure
    end: Figure
    bytes: Number
    bucket: Number | None
    calls: Annotated[tuple[tuple[str, Figure, Figure], ...], FailFast()] = ()


Rows = Annotated[list[EventRow], FailFast()]


@dataclass(frozen=True)
class TimelineRows:
    """The schema of one timeline."""

    actions: Rows


def rows_of(timeline: Timeline) -> list[list[Any]]:
    """Return the events of a timeline as plain rows; see ``EventRow``."""
    return [[e.rank, e.actor, str(e.action), e.start, e.end, e.bytes, e.bucket, e.calls] for e in timeline.events]


def timeline_of(rows: Sequence[EventRow], schedule: Schedule, *, measured: bool) -> Timeline:
    """Return the timeline that rows are of.

    Args:
        rows: The rows.
        schedule: The schedule that was performed.
        measured: Whether the times are a clock's.

    Raises:
        DamagedError: The schedule can't have produced them.
    """
    faults, events = list[str](), list[Event]()
    for row in rows:
        try:
            action = Action.parse(row.action)
        except ValueError as error:
            faults.append(f"has {error}")
            continue
        calls = tuple(Call(*call) for call in row.calls)
        events.append(Event(row.rank, row.actor, action, row.start, row.end, row.bytes, row.bucket, calls))
    faults += (f"has {event.action} on rank {event.rank}: {why}" for event in events for why in _odd(event, schedule))
    if faults:
        raise DamagedError(*faults[:MOST_FAULTS])
    return Timeline(_as_measured(schedule, events), tuple(events), measured)


def _as_measured(schedule: Schedule, events: Sequence[Event]) -> Schedule:
    """Return the schedule that a timeline was measured with.

    An older raypar wrote the schedule before backwards were split. Then its rows are replaced by those of the events.
    """
    planned = {action for row in schedule.rows for action in row}
    if not any(event.action.op is Op.I and event.action not in planned for event in events):
        return schedule
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for event in events:
        if event.bucket is None and event.rank < len(rows):
            rows[event.rank].append(event.action)
    return replace(schedule, rows=tuple(map(tuple, rows)))


def _odd(event: Event, schedule: Schedule) -> Iterator[str]:
    """Yield the reasons why a schedule can't have produced an event."""
    stage, _, microbatch, _ = event.action
    if event.rank >= schedule.num_ranks or (stage or 0) >= schedule.num_stages:
        yield f"the schedule has {schedule.num_ranks} ranks and {schedule.num_stages} stages"
    if (microbatch or 0) >= schedule.num_microbatches:
        yield f"the schedule has {schedule.num_microbatches} microbatches"
    if event.end < event.start:
        yield "it ends before it starts"
