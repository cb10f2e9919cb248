"""The timeline: when each action of a schedule started and ended, simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from raypar.schedules.action import COMPUTE, MOVES, Action, Op
from raypar.schedules.float_sum import float_sum
from raypar.schedules.rules import most_held
from raypar.schedules.schedule import MOST_DRAWN, Schedule, drawer


class Call(NamedTuple):
    """A part of a collective op in which its caller could do nothing else: its start, or the wait for it.

    Attributes:
        name: Axis and op, as "ep all_to_all".
        start: When it began, in seconds; on the actor, as a mark of its device's clock.
        end: When it ended, in the same.
    """

    name: str
    start: float
    end: float


class Event(NamedTuple):
    """One action of a timeline, performed or simulated.

    Attributes:
        rank: The pipeline rank, in whose lane it is drawn.
        actor: The actor's coordinates, such as ``pp=1 dp=0 tp=3``.
        action: The action; REDUCE_GRAD for a bucket, UNSHARD for a unit.
        start: When it started, in seconds on the timeline's clock.
        end: When it ended, in seconds on the same clock.
        bytes: Bytes sent or received; 0 for a compute action.
        bucket: Number of the bucket of gradients that is reduced, or of the unit of weights that is gathered, while
            other actions run; None for an action of the row. A simulated gather is one unit.
        calls: Communication within the action, as far as it was measured.
    """

    rank: int
    actor: str
    action: Action
    start: float
    end: float
    bytes: int = 0
    bucket: int | None = None
    calls: tuple[Call, ...] = ()

    def earlier(self, seconds: float) -> Event:
        """Return the event with all its times so much earlier."""
        calls = tuple(Call(name, start - seconds, end - seconds) for name, start, end in self.calls)
        return self._replace(start=self.start - seconds, end=self.end - seconds, calls=calls)

    @property
    def part(self) -> str:
        """The part of its stage that is reduced or gathered, "bucket 2" or "unit 2"; "" for an action of the row."""
        if self.bucket is None or self.action.op in MOVES:
            return ""
        return f"{'unit' if self.action.op is Op.UNSHARD else 'bucket'} {self.bucket}"


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of one pipeline, each rank's in their order.

    A rank has one event at a time, except for buckets and units. With several replicas, a timeline shows one of them.
    A measured timeline may be incomplete, as after a failed step.

    Attributes:
        schedule: The schedule.
        events: The events.
        measured: Whether the times are a clock's, which are drawn as milliseconds. Simulated times have the unit of the
            costs.
    """

    schedule: Schedule
    events: tuple[Event, ...]
    measured: bool = False

    def __repr__(self) -> str:
        """Return the grid for a REPL."""
        return drawer().text(self) if len(self.events) <= MOST_DRAWN else f"<Timeline of {self.schedule.title}>"

    def _repr_svg_(self) -> str:
        """Return the picture for a notebook."""
        return drawer().svg(self)

    _repr_html_ = _repr_svg_  # within the page, so that it has its colours

    def save(self, path: str | Path) -> Path:
        """Write a drawing, and return its path.

        Args:
            path: The file. Its ending selects the format: the picture (.svg), the whole grid (.txt) or a trace for
                Perfetto (.json).

        Raises:
            ScheduleError: The path has another ending.
            OSError: The file can't be written.
        """
        return drawer().save(self, path)

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self.schedule.name

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return self.schedule.num_ranks

    @property
    def start(self) -> float:
        """When the first event starts, in seconds."""
        return min((event.start for event in self.events), default=0.0)

    @property
    def end(self) -> float:
        """When the last event ends, in seconds."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return self.end - self.start

    def busy(self, rank: int | None = None) -> float:
        """Return the seconds that one rank, or all ranks together, spend computing (F, B, I, W)."""
        return float_sum(
            event.end - event.start
            for event in self.events
            if event.action.op in COMPUTE and (rank is None or event.rank == rank)
        )

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which nothing is computed: 0 is a full pipeline, 1 an idle one.

        Every rank's time is the makespan.
        """
        whole = self.num_ranks * self.makespan
        return 1 - self.busy() / whole if whole else 0.0

    @property
    def happened(self) -> Schedule:
        """The schedule with its rows in the order in which the actions happened, which differs if arrival decides it.

        Of several actors of a rank it is the order of the first. It can be saved, checked and run as any other one.
        """
        rows: list[list[Action]] = [[] for _ in self.schedule.rows]
        actors: dict[int, str] = {}
        for event in self.events:
            if event.bucket is None and actors.setdefault(event.rank, event.actor) == event.actor:
                rows[event.rank].append(event.action)
        return replace(self.schedule, rows=tuple(map(tuple, rows)))

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The largest number of activations that each rank holds at once, each from its F to its B, or I and W.

        Those in host memory do not count. An evaluation holds none.
        """
        if self.schedule.forward_only:
            return (0,) * self.num_ranks
        rows: list[list[Action]] = [[] for _ in self.schedule.rows]
        for event in self.events:
            rows[event.rank].append(event.action)
        return tuple(map(most_held, rows))
