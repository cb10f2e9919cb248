"""The sections of a report on experts: auxiliary losses, how even the load is, and the load of each expert."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from raypar.reporting.html.charts import ChartLine, Mark, line_chart
from raypar.reporting.html.figures import History, Points, significant, smoothed
from raypar.reporting.html.heat_map import COLUMNS, Cell, Scale, heat_map, shades
from raypar.reporting.html.markup import COLORS, element, folded, note, section
from raypar.schedules.float_sum import float_sum
from raypar.schedules.formatting import percentage

_EVEN = Scale((0.5, 0.8, 1.25, 2.0), ("under half the mean", "under 0.8", "0.8 to 1.25", "under 2 x the mean", "more"))
_DROPS = Scale((0.01, 0.05, 0.1, 0.2), ("under 1 %", "under 5 %", "under 10 %", "under 20 %", "more"))
_MOST_CELLS = 12_000  # of all maps together: a page of some MB
_FEWEST_COLUMNS = 12
_LAYERS = 6  # maps that are open

_LOAD_NOTE = (
    "The choices of the expert that most tokens have chosen, over the mean of its layer, in the layer where that is "
    "largest: 1 is even. Choices that were dropped count too."
)
_MAPS_NOTE = (
    "Choices of each expert by step, over the mean of its layer. Point at a cell for its figures; of steps that share "
    "a column, it shows the one with the most."
)
_AUX_NOTE = "As they are in the objective of a step, summed over the layers; the loss above is without them."

Lines = dict[int, dict[str, dict[str, Any]]]  # by step and layer: the counts


def experts(history: History, marks: Sequence[Mark]) -> list[Markup]:
    """Draw auxiliary losses, the load of experts and their drops; nothing of a run without them."""
    kinds = list(dict.fromkeys(kind for line in history.steps for kind in line.get("aux") or {}))
    parts = [section(*_losses(history, kinds, marks))] if kinds else []
    load = history.points("max_load")
    if load:
        lines = [ChartLine("smoothed", smoothed(load)), ChartLine("every step", load, faint=True)]
        parts.append(
            section("Load of experts: max/mean", line_chart(lines, significant, marks=marks), note(_LOAD_NOTE))
        )
    dropped = history.points("dropped")
    if any(value for _, value in dropped):
        drawn = line_chart([ChartLine("dropped", dropped)], percentage, zero=True, marks=marks)
        parts.append(section("Choices dropped", drawn))
    pairs = [element("div", *parts[at : at + 2], class_="pair") for at in range(0, len(parts), 2)]
    return [*pairs, *_maps(history)]


def aux_total(history: History) -> Points:
    """Return ``(number of steps taken, sum of the auxiliary losses)`` of every step that has some."""
    return [(line["step"] + 1, float_sum(line["aux"].values())) for line in history.steps if line.get("aux")]


def _losses(history: History, kinds: Sequence[str], marks: Sequence[Mark]) -> Iterator[Any]:
    """Yield the title and the content of the section of auxiliary losses."""
    yield "Auxiliary losses"
    lines = [
        ChartLine(
            kind,
            smoothed([(line["step"] + 1, line["aux"][kind]) for line in history.steps if kind in (line["aux"] or {})]),
            COLORS[index % len(COLORS)],
        )
        for index, kind in enumerate(kinds)
    ]
    yield line_chart(lines, significant, zero=True, marks=marks, named=True)
    yield note(f"Smoothed. {_AUX_NOTE}")


def _maps(history: History) -> Iterator[Markup]:
    """Draw a map of experts by steps for each layer; of many layers, those that are least even."""
    lines: Lines = {
        line["step"] + 1: {each["layer"]: each for each in line["loads"]["layers"]}
        for line in history.steps
        if line.get("loads")
    }
    counts = {layer: len(each["asked"]) for found in lines.values() for layer, each in found.items()}
    if not counts:
        return
    unevens = {layer: statistics.median(_uneven(lines, layer)) for layer in counts}
    shown, rows = list[str](), 0
    for layer in sorted(counts, key=lambda layer: -unevens[layer]):
        if shown and (rows + counts[layer]) * _FEWEST_COLUMNS > _MOST_CELLS:
            break
        shown.append(layer)
        rows += counts[layer]
    columns = max(_FEWEST_COLUMNS, min(COLUMNS, _MOST_CELLS // rows))
    drawn = [_map(layer, counts[layer], lines, unevens[layer], columns) for layer in counts if layer in shown]
    pairs = [element("div", *drawn[at : at + 2], class_="pair") for at in range(0, len(drawn), 2)]
    first, rest = pairs[: _LAYERS // 2], pairs[_LAYERS // 2 :]
    more = [folded(f"{len(drawn) - _LAYERS} more layers", *rest)] if rest else []
    left = len(counts) - len(shown)
    left_out = f" Left out: the {left:,} layers whose load is the most even." if left else ""
    key = element("div", element("span", element("b", "load"), shades("one", _EVEN)), class_="key shades")
    drops = _drops(lines, counts)
    yield section("Load of each expert", *first, *more, key, note(_MAPS_NOTE + left_out), *drops)


def _map(layer: str, count: int, lines: Lines, uneven: float, columns: int) -> Markup:
    cells = {step: _cells(found.get(layer)) for step, found in lines.items()}
    title = element("h3", f"{layer}: max/mean {uneven:.2f} (median)")
    return element("div", title, heat_map([str(n) for n in range(count)], cells, "one", _EVEN, columns))


def _cells(counted: Mapping[str, Any] | None) -> dict[str, Cell]:
    if counted is None or not sum(counted["asked"]):
        return {}
    asked = counted["asked"]
    dropped = counted.get("dropped") or [0] * len(asked)
    mean = sum(asked) / len(asked)
    return {
        str(expert): Cell(
            load / mean,
            f"{load / mean:.2f} x the mean ({load:,} choices{f', {lost:,} of them dropped' if lost else ''})",
        )
        for expert, (load, lost) in enumerate(zip(asked, dropped, strict=True))
    }


def _drops(lines: Lines, layers: Mapping[str, int]) -> list[Markup]:
    """Draw the share of choices that each layer has dropped; nothing if none has."""
    cells = {
        step: {
            layer: Cell(sum(lost) / sum(each["asked"]), f"{100 * sum(lost) / sum(each['asked']):.2g} % dropped")
            for layer, each in found.items()
            if any(lost := each.get("dropped") or ())
        }
        for step, found in lines.items()
    }
    if not any(cells.values()):
        return []
    key = element("div", element("span", element("b", "dropped"), shades("bad", _DROPS)), class_="key shades")
    return [element("h3", "Share of choices dropped, by layer"), heat_map(list(layers), cells, "bad", _DROPS), key]


def _uneven(lines: Lines, layer: str) -> list[float]:
    asked = [found[layer]["asked"] for found in lines.values() if layer in found]
    return [max(each) * len(each) / sum(each) if sum(each) else 1.0 for each in asked]
