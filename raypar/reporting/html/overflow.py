"""The section of a report that shows where values overflow and underflow a number format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from raypar.reporting.html.figures import History
from raypar.reporting.html.heat_map import Cell, heat_map, shades
from raypar.reporting.html.markup import element, note, section

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
