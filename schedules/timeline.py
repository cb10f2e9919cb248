"""The timeline: what a schedule leaves behind, simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from raypar.schedules.action import COMPUTE, Action
from raypar.schedules.rules import HOLDS
from raypar.schedules.schedule import MOST_DRAWN, Schedule, drawer


class Event(NamedTuple):
    """One action that was done, or would be.

    rank   the pipeline rank, which is the lane it is drawn in
    actor  who did it, by its coordinates: ``pp=1 dp=0 tp=3``
    start  seconds, on the clock of the timeline
    end    seconds
    bytes  bytes that were sent or received, 0 for a compute action
    bucket None for an action of the row; else the reduction of the bucket of gradients of this number, which goes on
           beside the actions, with REDUCE_GRAD for its action
    """

    rank: int
    actor: str
    action: Action
    start: float
    end: float
    bytes: int = 0
    bucket: int | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of one pipeline, in an order that keeps each rank's events in their order.

    One event a rank at a time, but for buckets; of a layout with several replicas, one timeline shows one of them. A
    measured timeline may be incomplete, that of a failed step is.

    measured  its times are a clock's, and are written as milliseconds; on paper they are in whatever unit costs have
    """

    schedule: Schedule
    events: tuple[Event, ...]
    measured: bool = False

    def __repr__(self) -> str:
        """The grid, as a REPL shows it."""
        return drawer().text(self) if len(self.events) <= MOST_DRAWN else f"<Timeline of {self.schedule.title}>"

    def _repr_svg_(self) -> str:
        """The picture that a notebook shows."""
        return drawer().svg(self)

    def save(self, path: str | Path) -> Path:
        """Write the picture (.svg), the whole grid (.txt) or a trace for Perfetto (.json); returns the path.

        Raises ScheduleError for another ending, OSError if the file can't be written.
        """
        return drawer().save(self, path)

    @property
    def name(self) -> str:
        return self.schedule.name

    @property
    def num_ranks(self) -> int:
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
        """Seconds of compute (F, B, I, W) of one rank, or of all ranks together."""
        return sum(
            event.end - event.start
            for event in self.events
            if event.action.op in COMPUTE and (rank is None or event.rank == rank)
        )

    @property
    def bubble(self) -> float:
        """The part of the ranks' time in which nothing is computed: 0 is a full pipeline, 1 an idle one.

        Every rank's time is the makespan. A report's bubble takes each actor's own, from its first action to its last:
        up to 0.2 points less, since actors begin a step within a millisecond or two.
        """
        whole = self.num_ranks * self.makespan
        return 1 - self.busy() / whole if whole else 0.0

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most activations each rank holds at once: forwards whose B, or I and W, is not done yet.

        An evaluation holds none.
        """
        if self.schedule.forward_only:
            return (0,) * self.num_ranks
        held, most = [0] * self.num_ranks, [0] * self.num_ranks
        for event in self.events:
            rank = event.rank
            held[rank] += HOLDS.get(event.action.op, 0)
            if held[rank] > most[rank]:
                most[rank] = held[rank]
        return tuple(most)
