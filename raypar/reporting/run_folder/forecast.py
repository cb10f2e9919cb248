"""What was predicted of a run before it started, as its folder keeps it, to be held against what it took."""

from __future__ import annotations

import json
from dataclasses import dataclass

from raypar.reporting.run_folder.damage import json_of
from raypar.reporting.run_folder.metrics_line import Figure, Number, Numbers
from raypar.reporting.run_folder.timeline_rows import Rows, rows_of, timeline_of
from raypar.schedules.schedule import Schedule
from raypar.schedules.timeline import Timeline


@dataclass(frozen=True)
class Forecast:
    """What was predicted of the steps of a run in one layout.

    Attributes:
        since: Number of steps taken before the first one that it is of.
        source: Where its costs come from: "from the calibration".
        step: Seconds of a step; None if they are not known.
        peaks: By pipeline rank, the bytes of an actor at its peak; empty if they are not known.
        better: Why it is not from a calibration, and what would give one; "" if it is.
        timeline: The simulated step; None if the folder has it not.
    """

    since: int
    source: str
    step: float | None
    peaks: tuple[int, ...]
    better: str
    timeline: Timeline | None


@dataclass(frozen=True)
class _Written:
    """The schema of the file of a forecast."""

    since: Number
    source: str
    step: Figure | None
    peaks: Numbers
    better: str
    actions: Rows


def forecast_text(forecast: Forecast) -> str:
    """Return the text of the file of a forecast."""
    written = {**vars(forecast), "actions": [] if forecast.timeline is None else rows_of(forecast.timeline)}
    del written["timeline"]
    return json.dumps(written)


def forecast_in(raw: bytes, schedule: Schedule | None) -> Forecast:
    """Read the file of a forecast.

    Args:
        raw: The file.
        schedule: The run's schedule of a training step; None if it is not known.

    Raises:
        DamagedError: It is no forecast, or of another schedule.
    """
    found = json_of(raw, _Written)
    timeline = None
    if schedule is not None and found.actions:
        timeline = timeline_of(found.actions, schedule, measured=False)
    return Forecast(found.since, found.source, found.step, tuple(found.peaks), found.better, timeline)
