"""Charts in SVG and HTML: lines over steps, and bars. script.js adds the figures at the pointer, other axes, and CSV.

Lines are stretched to the width of the window; letters are HTML, so that they have one size in every window.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from markupsafe import Markup

from raypar.reporting.html.markup import concatenated, element
from raypar.schedules.drawing.svg import ticks
from raypar.schedules.float_sum import float_sum
from raypar.schedules.formatting import percentage

Point = tuple[float, float]
WIDTH, HEIGHT = 1000, 200  # units of a plot, which is stretched
_FINEST = 300  # parts of a line, each drawn by its lowest and its highest point
DASHES = 4  # patterns of dashes
_SIGNS = {"resume": "\u25b6", "failure": "\u2715"}


def axis_buttons(runs: Sequence[Mapping[str, Any]]) -> Markup:
    """Make the buttons that change the x axis of all charts of a page, which has these runs; see ``History.axes``."""
    names = {"step": "step", "seen": " or ".join(dict.fromkeys(str(run["unit"]) for run in runs)), "time": "time"}
    buttons = [
        element("button", name, value=value, aria_pressed=str(value == "step").lower()) for value, name in names.items()
    ]
    return element("div", "x axis: ", *buttons, class_="axes", data_axes=json.dumps(runs), hidden="")


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart.

    Attributes:
        name: Its name in the legend.
        points: ``(step, value)``, sorted by step. A value that is not finite is a gap.
        color: The CSS class of its colour, "one" to "six".
        faint: Whether the line is thin and pale.
        run: Number of its run on the page, whose axes it has.
        dashes: Its pattern of dashes: 0 is a whole, thick line on which the others stay visible; None for a usual line.
    """

    name: str
    points: Sequence[Point]
    color: str = "one"
    faint: bool = False
    run: int = 0
    dashes: int | None = None

    @property
    def style(self) -> str:
        """The CSS classes of the line."""
        dashes = [] if self.dashes is None else [f"dashes-{self.dashes}"]
        return " ".join([self.color, *["faint"] * self.faint, *dashes])

    @property
    def finite(self) -> list[Point]:
        """Its points without the gaps."""
        return [(x, y) for x, y in self.points if math.isfinite(y)]

    def figures(self, spelled: Callable[[float], str], steps: Container[float]) -> dict[str, Any]:
        """Return what the page's script needs of it: its points at these steps."""
        shown = [(x, y) for x, y in self.finite if x in steps]
        return {
            "name": self.name,
            "color": self.color,
            "run": self.run,
            "steps": [x for x, _ in shown],
            "values": [y for _, y in shown],
            "texts": [spelled(y) for _, y in shown],
        }


@dataclass(frozen=True)
class Mark:
    """Something that happened to a run, marked on the axis of every chart.

    Attributes:
        step: Number of steps taken before it.
        kind: "resume" or "failure".
        text: What happened.
    """

    step: float
    kind: Literal["resume", "failure"]
    text: str

    @property
    def sign(self) -> Markup:
        """Its sign on the axis."""
        return element("span", _SIGNS[self.kind], class_=self.kind)


def line_chart(
    lines: Sequence[ChartLine],
    spelled: Callable[[float], str],
    *,
    zero: bool = False,
    marks: Sequence[Mark] = (),
    named: bool = False,
    unit: str = "",
) -> Markup:
    """Draw lines over steps, with a legend if there are several.

    Args:
        lines: The lines.
        spelled: Formats the values.
        zero: Whether the value axis includes 0.
        marks: What happened to the run.
        named: Whether a single line has a legend too.
        unit: That of the values, for a file of them, if neither the lines nor the title name it; shares have one.

    Returns:
        The chart, or a note if there are no finite values.
    """
    values = [y for line in lines for _, y in line.finite]
    if not values:
        return element("p", "No figures.", class_="note")
    steps = [x for line in lines for x, _ in line.points]
    low, high = min(values + [0.0] * zero), max(values)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    first, last = min(steps), max(steps)
    first = min(first, 1.0) if 2 * first < last else first  # a run that begins late has its axis begin there
    frame = _Frame(first, last, low - (0.0 if zero else margin), high + margin)
    marks = [mark for mark in marks if frame.first <= mark.step <= frame.last]
    drawn = element(
        "svg",
        *_grid(frame, marks),
        *(part for line in lines for part in _line(line, frame)),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=", ".join(line.name for line in lines),
    )
    scale = [
        element("span", spelled(value), style=f"top: {frame.y(value) * 100 / HEIGHT:.1f}%")
        for value in ticks(frame.low, frame.high, 5)
    ]
    kept = {x for line in lines for x, _ in _thinned(line.finite)}  # of long lines; a file has all lines at each
    chart = element(
        "div",
        element("div", *scale, class_="scale"),
        element("div", drawn, *_signs(frame, marks), class_="plot"),
        element("div", *_steps(frame), class_="steps"),
        class_="chart",
        data_range=json.dumps([frame.first, frame.last]),
        data_unit=unit or ("share of 1" if spelled is percentage else ""),
        data_lines=json.dumps([line.figures(spelled, kept) for line in lines]),
    )
    return concatenated(chart, _legend(lines if named or len(lines) > 1 else []))


def stacked(
    rows: Mapping[str, Mapping[str, float]], styles: Mapping[str, str], spelled: Callable[[float], str]
) -> Markup:
    """Draw a bar of parts for each row, on one scale, and the legend of several parts.

    Args:
        rows: By row and part, the values, 0 or more.
        styles: By part, its CSS classes.
        spelled: Formats the values.

    Returns:
        The bars.
    """
    longest = max((float_sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    seen = [name for name in styles if any(parts.get(name) for parts in rows.values())]
    drawn = list[Markup]()
    for row, parts in rows.items():
        pieces = [
            element(
                "i",
                class_=styles[name],
                style=f"width: {100 * parts[name] / longest:.2f}%",
                data_tip=f"{row}: {name} {spelled(parts[name])}",
            )
            for name in seen
            if parts.get(name)
        ]
        whole = element("b", spelled(float_sum(parts.values())))
        drawn.append(element("div", element("span", row), element("div", *pieces), whole, class_="stack"))
    key = [element("span", element("i", class_=f"box {styles[name]}"), name) for name in seen]
    return concatenated(*drawn, *([element("div", *key, class_="key")] if len(key) > 1 else []))


@dataclass(frozen=True)
class _Frame:
    """The ranges of the two axes, and their mapping to the units of a plot."""

    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        span = self.last - self.first
        return WIDTH * ((step - self.first) / span if span else 0.5)

    def y(self, value: float) -> float:
        return HEIGHT * (self.high - value) / (self.high - self.low)


def _grid(frame: _Frame, marks: Sequence[Mark]) -> Iterator[Markup]:
    for value in ticks(frame.low, frame.high, 5):
        y = f"{frame.y(value):.1f}"
        yield element("line", x1=0, x2=WIDTH, y1=y, y2=y, class_="grid")
    for mark in marks:
        x = f"{frame.x(mark.step):.1f}"
        yield element("line", x1=x, x2=x, y1=0, y2=HEIGHT, class_=f"grid {mark.kind}")


def _steps(frame: _Frame) -> Iterator[Markup]:
    """Label the first step and round ones after it."""
    found = [step for step in ticks(frame.first, frame.last, 6) if step == int(step)]
    apart = found[1] - found[0] if len(found) > 1 else 1.0
    for step in [frame.first, *(step for step in found if step - frame.first > 0.6 * apart)]:
        yield element("span", f"{step:,.0f}", style=f"left: {frame.x(step) * 100 / WIDTH:.1f}%")
    yield element("b", "step")


def _signs(frame: _Frame, marks: Sequence[Mark]) -> Iterator[Markup]:
    for mark in marks:
        left = f"left: {frame.x(mark.step) * 100 / WIDTH:.1f}%"
        yield element("span", mark.sign, class_="sign", style=left, title=mark.text)


def _legend(lines: Sequence[ChartLine]) -> Markup:
    names = [element("span", element("span", element("i"), class_=line.style), line.name) for line in lines]
    return element("div", *names, class_="key") if names else Markup()


def _line(line: ChartLine, frame: _Frame) -> Iterator[Markup]:
    for stretch in _stretches(line.points):
        pixels = [(frame.x(x), frame.y(y)) for x, y in _thinned(stretch)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in pixels)
        yield element("path", d=path, class_=f"line {line.style}", data_run=line.run)
        if len(line.points) <= 30 or len(stretch) == 1:  # round dots however the plot is stretched: lines of no length
            dots = "".join(f"M{x:.1f} {y:.1f}h.01" for x, y in pixels)
            yield element("path", d=dots, class_=f"dot {line.style}", data_run=line.run)


def _stretches(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Split the points at values that are not finite."""
    found: list[Point] = []
    for x, y in points:
        if math.isfinite(y):
            found.append((x, y))
        elif found:
            yield found
            found = []
    if found:
        yield found


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Reduce points to what can be seen: the lowest and the highest of each of _FINEST parts, in their order."""
    if len(points) <= 2 * _FINEST:
        return list(points)
    edges = [round(part * len(points) / _FINEST) for part in range(_FINEST + 1)]
    kept: list[Point] = []
    for start, end in pairwise(edges):
        by_value = sorted(points[start:end], key=lambda point: point[1])
        kept += sorted({by_value[0], by_value[-1]})
    return kept
