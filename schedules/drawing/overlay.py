"""The overlay: a measured timeline and its prediction, drawn on one time axis."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from raypar.schedules.drawing.chrome_trace import chrome_trace
from raypar.schedules.drawing.files import save
from raypar.schedules.drawing.svg import LanesPicture
from raypar.schedules.drawing.text import WIDTH, grid, summary
from raypar.schedules.formatting import milliseconds
from raypar.schedules.schedule import MOST_DRAWN, ScheduleError
from raypar.schedules.timeline import Timeline

_WHY = "waits that the schedule does not ask for, and actions that were not as long as predicted"


@dataclass(frozen=True, slots=True)
class Overlay:
    """A measured and a predicted timeline of one schedule, in seconds; each rank has a lane for each of them.

    Attributes:
        measured: The measured timeline, in the upper lane.
        predicted: The simulated timeline, in the lower lane.
        source: The source of the predicted costs, such as "from FLOPs"; "" if not known.

    Raises:
        ScheduleError: If the timelines are of different schedules.
    """

    measured: Timeline
    predicted: Timeline
    source: str = ""

    def __post_init__(self) -> None:
        if self.measured.schedule != self.predicted.schedule:
            both = f"{self.measured.schedule.title} and {self.predicted.schedule.title}"
            raise ScheduleError(f"an overlay shows one schedule, not {both}: simulate the measured one's")

    @property
    def titles(self) -> list[str]:
        """Return one line for each timeline, with makespan, bubble and activations in flight, and how they differ."""
        measured, predicted = (f"{name} {summary(timeline, milliseconds)}" for name, timeline in self._named.items())
        length = self.measured.makespan
        error = f"the predicted makespan is off by {self.predicted.makespan / length - 1:+.0%}: " if length else ""
        return [measured, f"{predicted} ({self.source})" if self.source else predicted, f"{error}{_WHY}"]

    def svg(self) -> str:
        """Draw the overlay as standalone SVG."""
        return LanesPicture(self._named, self.titles, milliseconds).svg()

    def text(self, width: int | None = WIDTH) -> str:
        """Draw the overlay as text.

        Args:
            width: The most characters of a line, or None for no limit.

        Returns:
            Two lines for each rank, then the titles.
        """
        return "\n".join([*grid(self._named, width=width), *self.titles])

    def save(self, path: str | Path) -> Path:
        """Write the overlay to a file.

        Args:
            path: The file, by its suffix a picture (.svg), a text grid (.txt) or a trace for Perfetto with both
                timelines (.json).

        Returns:
            The path.

        Raises:
            ScheduleError: If the file has another suffix.
            OSError: If the file can't be written.
        """
        kinds: Mapping[str, Callable[[], str]] = {
            ".svg": self.svg,
            ".txt": lambda: self.text(width=None),
            ".json": lambda: json.dumps(chrome_trace(*(_from_zero(*named) for named in self._named.items()))),
        }
        return save(path, kinds)

    def __repr__(self) -> str:
        drawable = max(len(timeline.events) for timeline in self._named.values()) <= MOST_DRAWN
        return self.text() if drawable else f"<Overlay of {self.measured.schedule.title}>"

    def _repr_svg_(self) -> str:
        return self.svg()

    _repr_html_ = _repr_svg_  # within the page, so that it has its colours

    @property
    def _named(self) -> dict[str, Timeline]:
        return {"measured": self.measured, "predicted": self.predicted}


def _from_zero(name: str, timeline: Timeline) -> Timeline:
    """Return the timeline shifted to start at 0, with ``name`` added to its actors' names."""
    zero = timeline.start
    events = (event.earlier(zero)._replace(actor=f"{event.actor} {name}") for event in timeline.events)
    return Timeline(timeline.schedule, tuple(events), timeline.measured)
