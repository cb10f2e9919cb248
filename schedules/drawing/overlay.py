"""The overlay: what was measured over what was predicted, on one axis."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from raypar.schedules.drawing.chrome_trace import chrome_trace
from raypar.schedules.drawing.files import save
from raypar.schedules.drawing.svg import picture
from raypar.schedules.drawing.text import WIDTH, grid, milliseconds, summary
from raypar.schedules.schedule import MOST_DRAWN, ScheduleError
from raypar.schedules.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Overlay:
    """Two timelines of one schedule, in seconds: each rank has a lane for what was measured, and one for what was
    predicted below it.

    Raises ScheduleError if they are not of one schedule.
    """

    measured: Timeline
    predicted: Timeline

    def __post_init__(self) -> None:
        if self.measured.schedule != self.predicted.schedule:
            both = f"{self.measured.schedule.title} and {self.predicted.schedule.title}"
            raise ScheduleError(f"an overlay shows one schedule, not {both}: simulate the measured one's")

    @property
    def titles(self) -> list[str]:
        """A line for each: makespan, bubble, activations in flight."""
        return [f"{name} {summary(timeline, milliseconds)}" for name, timeline in self._named.items()]

    def svg(self) -> str:
        """The picture, as standalone SVG."""
        return picture(self._named, self.titles, milliseconds)

    def text(self, width: int | None = WIDTH) -> str:
        """The grid: two lines a rank, then the titles; ``width`` as in ``raypar.schedules.text``."""
        return "\n".join([*grid(self._named, width=width), *self.titles])

    def save(self, path: str | Path) -> Path:
        """Write the picture (.svg), the grid (.txt) or a trace for Perfetto with both (.json)."""
        kinds: Mapping[str, Callable[[], str]] = {
            ".svg": self.svg,
            ".txt": lambda: self.text(width=None),
            ".json": lambda: json.dumps(chrome_trace(*(_told(*named) for named in self._named.items()))),
        }
        return save(path, kinds)

    def __repr__(self) -> str:
        drawable = max(len(timeline.events) for timeline in self._named.values()) <= MOST_DRAWN
        return self.text() if drawable else f"<Overlay of {self.measured.schedule.title}>"

    def _repr_svg_(self) -> str:
        return self.svg()

    @property
    def _named(self) -> dict[str, Timeline]:
        return {"measured": self.measured, "predicted": self.predicted}


def _told(name: str, timeline: Timeline) -> Timeline:
    """The timeline from 0 on, whose actors tell which one it is."""
    zero = timeline.start
    events = (
        event._replace(actor=f"{event.actor} {name}", start=event.start - zero, end=event.end - zero)
        for event in timeline.events
    )
    return Timeline(timeline.schedule, tuple(events), timeline.measured)
