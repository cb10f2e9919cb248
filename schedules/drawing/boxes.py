"""The boxes of a picture: one for each action, or for the adjoining actions of a kind that would be too narrow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from raypar.schedules.action import COMPUTE, Op
from raypar.schedules.formatting import consecutive
from raypar.schedules.timeline import Event, Timeline

_JOINED = 3  # times the least width: boxes that are wider than this are never joined with others
_MOST_BANDS = 6  # of a stretch, one above the other
_ORDER = list(Op)  # of bands, so that those of a kind are at one height in adjoining stretches


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a picture.

    Attributes:
        events: The events that it shows: one, or several of one kind.
        start: When the first of them starts.
        end: When the last of them ends.
        band: Number of the box among those of its stretch of time, from the top.
        bands: Number of boxes of that stretch, which lie one above the other.
    """

    events: tuple[Event, ...]
    start: float
    end: float
    band: int = 0
    bands: int = 1

    @property
    def first(self) -> Event:
        """The first event; all are of its kind."""
        return self.events[0]

    @property
    def microbatches(self) -> str:
        """The microbatches of the events as ranges: "3", "0-7" or "0-3 8"."""
        numbers = sorted({event.action.microbatch for event in self.events if event.action.microbatch is not None})
        return " ".join(f"{one}-{other}" if other > one else str(one) for one, other in consecutive(numbers))

    @property
    def name(self) -> str:
        """The action, or the actions as a range: "2F0" or "2F0-7"."""
        if len(self.events) == 1:
            return str(self.first.action)
        stages = {event.action.stage for event in self.events}
        return f"{self.first.action.stage if len(stages) == 1 else ''}{self.first.action.op.value}{self.microbatches}"


def timeline_boxes(timeline: Timeline, least: float, widest: float) -> Iterator[Box]:
    """Yield the boxes of a timeline, with times from its start on.

    All compute actions are in them, and of a measured timeline the other events that are not too short.

    Args:
        timeline: The timeline.
        least: As in ``boxes_of``.
        widest: As in ``boxes_of``.
    """
    zero, rows = timeline.start, defaultdict[int, list[Event]](list)
    for event in timeline.events:
        moved = event._replace(start=event.start - zero, end=event.end - zero)
        length = event.end - event.start
        if event.bucket is not None:  # beside the actions of the row
            if length > least / 2:
                yield Box((moved,), moved.start, moved.end)
        elif event.action.op in COMPUTE or length > least * (1.0 if timeline.measured else 1e-6):
            rows[event.rank].append(moved)
    for row in rows.values():
        yield from boxes_of(row, least, widest)


def boxes_of(events: Iterable[Event], least: float, widest: float) -> Iterator[Box]:
    """Yield the boxes of one lane.

    A box that would be narrower than ``least`` is joined with those it adjoins. If they are of several kinds, there is
    a box for each kind, one above the other.

    Args:
        events: The events of the lane; two of them do not overlap.
        least: The least width of a box, in the unit of the events' times.
        widest: The largest width of boxes that are joined.
    """
    stretch = list[Event]()
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        if stretch and not (_join(stretch[-1], event, least) and event.end - stretch[0].start <= widest):
            yield from _bands(stretch)
            stretch = []
        stretch.append(event)
    yield from _bands(stretch)


def _join(before: Event, after: Event, least: float) -> bool:
    lengths = before.end - before.start, after.end - after.start
    return min(lengths) < least and max(lengths) < _JOINED * least and after.start - before.end < least


def _bands(stretch: list[Event]) -> Iterator[Box]:
    """Yield a box for each kind in a stretch of adjoining events."""
    kinds = dict[tuple[Op, int | None], list[Event]]()
    several_ops = len({event.action[:2] for event in stretch}) > _MOST_BANDS
    for event in stretch:
        kinds.setdefault((event.action.op, None if several_ops else event.action.stage), []).append(event)
    ordered = sorted(kinds.items(), key=lambda kind: (_ORDER.index(kind[0][0]), kind[0][1] or 0))
    for band, (_, found) in enumerate(ordered):
        start, end = (found[0].start, found[0].end) if len(stretch) == 1 else (stretch[0].start, stretch[-1].end)
        yield Box(tuple(found), start, end, band, len(kinds))
