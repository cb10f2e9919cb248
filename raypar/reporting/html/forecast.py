"""What was predicted of a run before it started, beside what it took, as a section of its page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from markupsafe import Markup

from raypar.reporting.forecasting import Comparison, forecast_and_measured
from raypar.reporting.html.figures import History
from raypar.reporting.html.markup import NUMBER, element, html_table, note, section
from raypar.reporting.run_folder.forecast import Forecast
from raypar.reporting.run_folder.read import Past
from raypar.schedules.drawing.overlay import Overlay

_TITLE = "Predicted before the run"


def comparisons(forecast: Forecast, history: History) -> list[Comparison]:
    """Hold a forecast against the steps that it is of. The time leaves out the first one, which also warms up."""
    lines = [line for line in history.steps if line["step"] >= forecast.since]
    times = [line["step_ms"] for line in lines if line.get("step_ms") is not None]
    peaks = [max(sizes) for sizes in zip_longest(*(line["peak_memory"] for line in lines), fillvalue=0)]
    return forecast_and_measured(forecast, times[1:] or times, peaks)


def forecast(past: Past, history: History) -> Markup:
    """Show the step time and the peaks that were predicted, what they were, and the latest step over its prediction."""
    if (found := past.forecast) is None:
        return section(_TITLE, note("The folder has no prediction: its run was written by a raypar that made none."))
    rows = [[one.name, one.measured, one.predicted, one.error] for one in comparisons(found, history)]
    listed = html_table(["", "measured", "predicted", "error"], rows, ["", NUMBER, NUMBER, NUMBER])
    sentences = [f"Predicted {found.source}{f', of the steps after step {found.since:,}' if found.since else ''}."]
    sentences += [f"{found.better[0].upper()}{found.better[1:]}."] if found.better else []
    sentences.append("Measured: the median of the steps, and the most memory of an actor.")
    return section(_TITLE, listed, note(" ".join(sentences)), *_laid_over(past, found))


def _laid_over(past: Past, forecast: Forecast) -> Sequence[Markup]:
    """Draw the latest measured step over the prediction, if the folder has both."""
    if past.step is None or past.step < forecast.since or forecast.timeline is None or not past.timelines:
        return []
    measured, predicted = past.timelines[0], forecast.timeline
    if not measured.events or measured.schedule != predicted.schedule:
        return []
    drawn = Overlay(measured, predicted, forecast.source).svg()
    return [element("div", Markup(drawn), class_="wide"), note(f"Step {past.step + 1:,} over the prediction.")]
