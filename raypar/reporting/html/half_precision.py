"""The sections of a report on half precision: overflow and underflow, the loss scale, and skipped steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from markupsafe import Markup

from raypar.reporting.html.charts import ChartLine, Mark, line_chart
from raypar.reporting.html.figures import History, Points, significant
from raypar.reporting.html.heat_map import Cell, heat_map, shades
from raypar.reporting.html.markup import element, note, section
from raypar.schedules.formatting import consecutive

_KINDS = {
    "activations": "Activations",
    "gradients": "Gradients of activations",
    "weight_gradients": "Gradients of weights",
}
_MEASURES = {"over": ("overflow", "bad"), "under": ("underflow", "one")}  # word and colour by field
_NOTE = (
    "Shares of values by layer and watched step. Overflow: infinite, NaN, or larger than {format} can hold; "
    "safe is under 1 % and not rising, and the log warns of the rest. Underflow: not zero, and below the smallest "
    "normal number of {format}; gradients that underflow are what a loss scale is for. Point at a cell for its figures."
)
SCALE = "Loss scale, as a power of 2"
_MOST = 20  # stretches of skipped steps that are listed


def overflow(history: History) -> Markup:
    """Draw overflow and underflow by layer and step; nothing if the run did not count them."""
    lines = {line["step"] + 1: line["overflow"] for line in history.steps if line.get("overflow")}
    if not lines:
        return Markup()
    formats = " or ".join({line["format"]: None for line in lines.values()})
    drawn = [part for kind, title in _KINDS.items() for part in _kind(lines, kind, title)]
    keys = [element("span", element("b", word), shades(color)) for word, color in _MEASURES.values()]
    key = element("div", *keys, class_="key shades")
    return section(f"Overflow and underflow of {formats}", *drawn, key, note(_NOTE.format(format=formats)))


def _kind(lines: dict[int, dict[str, Any]], kind: str, title: str) -> Iterator[Markup]:
    """Draw the two maps of one kind of values; where nothing overflows or underflows, say so."""
    found = {step: [each for each in line["layers"] if each["kind"] == kind] for step, line in lines.items()}
    layers = list(dict.fromkeys(each["layer"] for counts in found.values() for each in counts))
    if not layers:
        return
    maps = list[Markup]()
    for field, (word, color) in _MEASURES.items():
        inside = note(f"Nothing {word}s.")
        if any(each[field] for counts in found.values() for each in counts):
            cells = {step: {each["layer"]: _cell(each, field, word) for each in found[step]} for step in found}
            inside = heat_map(layers, cells, color)
        maps.append(element("div", element("h3", f"{title}: {word}"), inside))
    yield element("div", *maps, class_="pair")


def _cell(count: dict[str, Any], field: str, word: str) -> Cell:
    share = count[field] / count["values"] if count["values"] else 0.0
    where = "" if count["microbatch"] is None or field != "over" else f", most in microbatch {count['microbatch']}"
    text = f"{100 * share:.2g} % {word} ({count[field]:,} of {count['values']:,}{where}, on actor {count['actor']})"
    return Cell(share, text)


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
    found = consecutive(steps)
    listed = [f"step {first:,}" if first == last else f"steps {first:,} to {last:,}" for first, last in found[:_MOST]]
    return ", ".join([*listed, *([f"and {len(found) - _MOST:,} stretches more"] if len(found) > _MOST else [])])
