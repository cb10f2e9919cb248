"""What a run is predicted to take before it starts, and how far that was from what it took."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.run import Run
from raypar.planner.memory.worker import worker_memory
from raypar.planner.prediction import IN_SLOTS, Prediction, before_run, better_calibration
from raypar.planner.sizes.sized_run import SizedRun
from raypar.reporting.run_folder.forecast import Forecast
from raypar.schedules.formatting import milliseconds, size
from raypar.schedules.schedule import Schedule


class Comparison(NamedTuple):
    """A figure that was predicted and measured, in words.

    Attributes:
        name: What it is: "step time".
        measured: What it was; "" if nothing was measured.
        predicted: What was predicted of it; "" if nothing was.
        error: How far the prediction was from it, in percent of what was measured, with its sign; "" if that is not
            known.
    """

    name: str
    measured: str
    predicted: str
    error: str

    def __str__(self) -> str:
        values = [f"{value} {word}" for value, word in zip(self[1:3], ("measured", "predicted"), strict=True) if value]
        return ", ".join(values) + (f" ({self.error})" if self.error else "")


def forecast_of(
    run: Run, schedule: Schedule, skeleton: Skeleton | None, step: int = 0, prediction: Prediction | None = None
) -> Forecast:
    """Predict a step of a run, and the peak of its actors' memory.

    Args:
        run: The run.
        schedule: The lowered schedule of a training step.
        skeleton: The run's model without weights; built if it is needed and None.
        step: Number of steps taken before.
        prediction: The prediction of a step, if it is known; None to make it.
    """
    sized = SizedRun.of(run, schedule, skeleton)
    found = prediction or before_run(sized)
    memory = worker_memory(sized, found.timeline, found.process)
    is_known = found.source != IN_SLOTS
    peaks = tuple(one.peak for one in memory) if all(one.activations is not None for one in memory) else ()
    better = better_calibration(run, found)
    drawn = found.timeline if is_known else None
    return Forecast(step, found.source, found.step if is_known else None, peaks, better, drawn)


def forecast_and_measured(forecast: Forecast, steps_ms: Sequence[float], peaks: Sequence[int]) -> list[Comparison]:
    """Hold a forecast against what steps have taken.

    Args:
        forecast: The forecast.
        steps_ms: Milliseconds of each step, without the first one, which also warms up.
        peaks: By pipeline rank, bytes of the actor that had most.

    Returns:
        A comparison of the step, whose median counts, and one of the peak of each pipeline rank.
    """
    median = statistics.median(steps_ms) / 1e3 if steps_ms else None
    since = f" after step {forecast.since:,}" if forecast.since else ""
    rows = [_compared(f"step time{since}", median, forecast.step, milliseconds)]
    known = forecast.peaks if len(forecast.peaks) == len(peaks) else [None] * len(peaks)
    for rank, (measured, predicted) in enumerate(zip(peaks, known, strict=True)):
        rows.append(_compared(f"peak memory, pp={rank}", measured or None, predicted, size))
    return rows


def _compared(
    name: str, measured: float | None, predicted: float | None, spelled: Callable[[float], str]
) -> Comparison:
    """Compare a figure, in words."""
    error = "" if not measured or predicted is None else f"{predicted / measured - 1:+.0%}"
    one, other = ("" if value is None else spelled(value) for value in (measured, predicted))
    return Comparison(name, one, other, error)
