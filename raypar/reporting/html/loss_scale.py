"""The section of a report that shows the scale of the loss in half precision, and the steps that were skipped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from markupsafe import Markup

from raypar.reporting.html.charts import ChartLine, Mark, line_chart
from raypar.reporting.html.figures import History, Points, significant
from raypar.reporting.html.markup import note, section

SCALE = "Loss scale, as a power of 2"
_MOST = 20  # stretches of skipped steps that are listed


def loss_scale(history: History, marks: Sequence[Mark]) -> Markup:
    """Draw the loss scale over steps, and list the steps that were skipped; nothing of a run without either."""
    scales, skipped = scale_powers(history), history.skipped
    if not scales and not skipped:
        return Markup()
    drawn = line_chart([ChartLine("loss scale", scales)], significant, marks=marks) if scales else Markup()
    why = "because the loss or a gradient was not finite: no weight was changed, and the learning rate counts as 0"
    text = f"Skipped, {why}: {_stretches(skipped)}." if skipped else "No step was skipped."
    return section(SCALE, drawn, note(text))


def scale_powers(history: History) -> Points:
    """Return ``(number of steps taken, loss scale as a power of 2)`` of every step whose loss was scaled."""
    return [(step, math.log2(scale)) for step, scale in history.points("loss_scale") if scale > 0]


def _stretches(steps: Iterable[int]) -> str:
    """List steps in words: step 4, steps 7 to 9."""
    found = list[tuple[int, int]]()
    for step in steps:
        if found and found[-1][1] == step - 1:
            found[-1] = found[-1][0], step
        else:
            found.append((step, step))
    listed = [f"step {first:,}" if first == last else f"steps {first:,} to {last:,}" for first, last in found[:_MOST]]
    return ", ".join([*listed, *([f"and {len(found) - _MOST:,} stretches more"] if len(found) > _MOST else [])])
