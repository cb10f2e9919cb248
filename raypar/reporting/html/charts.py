"""Charts in SVG and HTML without scripts: lines over steps, and bars. Tooltips give the figures of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from raypar.reporting.html.markup import Markup, element, joined
from raypar.schedules.drawing.svg import ticks

Point = tuple[float, float]
NARROW, BROAD = 560, 760  # width of a chart in half of the page, and in all of it
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 230, 56, 14, 10, 46
_FINEST = 300  # parts of a line, each drawn by its lowest and its highest point
_COLUMNS = 100  # columns with tooltips


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: Its name in the legend.
        points: ``(step, value)``, sorted by step. A value that is not finite is a gap.
        color: The CSS class of its colour, "one" or "two".
    """

    name: str
    points: Sequence[Point]
    color: str = "one"


def line_chart(
    lines: Sequence[Line], spelled: Callable[[float], str], *, zero: bool = False, broad: bool = False
) -> Markup:
    """Draw lines over steps, with a legend if there are several.

    Args:
        lines: The lines.
        spelled: Formats the values.
        zero: Whether the value axis includes 0.
        broad: Whether the chart is as wide as the page; else it is half as wide.

    Returns:
        The chart, or a note if there are no finite values.
    """
    values = [y for line in lines for _, y in line.points if math.isfinite(y)]
    if not values:
        return element("p", "No figures.", class_="note")
    steps = [x for line in lines for x, _ in line.points]
    low, high = min(values + [0.0] * zero), max(values)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    frame = _Frame(min(steps), max(steps), low - (0.0 if zero else room), high + room, BROAD if broad else NARROW)
    drawn = element(
        "svg",
        *_axes(frame, spelled),
        *(part for line in lines for part in _line(line, frame)),
        *_columns(lines, frame, spelled),
        viewBox=f"0 0 {frame.width} {HEIGHT}",
        class_="chart broad" if broad else "chart",
        role="img",
        aria_label=", ".join(line.name for line in lines),
    )
    keys = [element("span", element("i"), line.name) for line in lines]
    told = [element("span", key, class_=line.color) for key, line in zip(keys, lines, strict=True)]
    return joined(drawn, element("div", *told, class_="key")) if len(lines) > 1 else drawn


def bars(rows: Sequence[tuple[str, float]], spelled: Callable[[float], str]) -> Markup:
    """Draw a bar for each row.

    Args:
        rows: ``(name, value)``; values are 0 or more.
        spelled: Formats the values.

    Returns:
        The bars.
    """
    longest = max((value for _, value in rows), default=0.0) or 1.0
    return joined(
        *(
            element(
                "div",
                element("span", name),
                element("div", element("div", style=f"width: {100 * value / longest:.1f}%")),
                element("b", spelled(value)),
                class_="bar",
            )
            for name, value in rows
        )
    )


@dataclass(frozen=True)
class _Frame:
    """The ranges of the two axes, and their mapping to pixels."""

    first: float
    last: float
    low: float
    high: float
    width: int

    def x(self, step: float) -> float:
        span = self.last - self.first
        return LEFT + (self.width - LEFT - RIGHT) * ((step - self.first) / span if span else 0.5)

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - value) / (self.high - self.low)


def _axes(frame: _Frame, spelled: Callable[[float], str]) -> Iterator[Markup]:
    for value in ticks(frame.low, frame.high, 6):
        y = f"{frame.y(value):.1f}"
        yield element("line", x1=LEFT, x2=frame.width - RIGHT, y1=y, y2=y, class_="grid")
        yield element("text", spelled(value), x=LEFT - 6, y=f"{frame.y(value) + 4:.1f}", text_anchor="end")
    steps = [step for step in ticks(frame.first, frame.last, 8) if step == int(step)] or [frame.first]
    for step in steps:
        yield element("text", f"{step:,.0f}", x=f"{frame.x(step):.1f}", y=HEIGHT - BOTTOM + 19, text_anchor="middle")
    yield element("text", "step", x=(LEFT + frame.width - RIGHT) / 2, y=HEIGHT - 4, text_anchor="middle")


def _line(line: Line, frame: _Frame) -> Iterator[Markup]:
    for stretch in _stretches(line.points):
        places = [(frame.x(x), frame.y(y)) for x, y in _thinned(stretch)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        yield element("path", d=path, class_=f"line {line.color}")
        if len(line.points) <= 30 or len(stretch) == 1:
            yield from (element("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3, class_=line.color) for x, y in places)


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
    edges = [round(place * len(points) / _FINEST) for place in range(_FINEST + 1)]
    kept: list[Point] = []
    for start, end in pairwise(edges):
        by_value = sorted(points[start:end], key=lambda point: point[1])
        kept += sorted({by_value[0], by_value[-1]})
    return kept


def _columns(lines: Sequence[Line], frame: _Frame, spelled: Callable[[float], str]) -> Iterator[Markup]:
    """Cover the chart with invisible columns whose tooltips give the figures of a step."""
    found = [dict(line.points) for line in lines]
    steps = sorted({step for values in found for step in values})
    few = {step for values in found if len(values) <= _COLUMNS for step in values}
    shown = sorted(few | {steps[place * len(steps) // _COLUMNS] for place in range(_COLUMNS)})
    middles = [frame.x(before) / 2 + frame.x(after) / 2 for before, after in pairwise(shown)]
    starts, ends = [float(LEFT), *middles], [*middles, float(frame.width - RIGHT)]
    for step, start, end in zip(shown, starts, ends, strict=True):
        told = ", ".join(
            f"{line.name} {spelled(values[step])}" for line, values in zip(lines, found, strict=True) if step in values
        )
        tip = element("title", f"step {step:,.0f}: {told}")
        yield element(
            "rect", tip, x=f"{start:.1f}", y=TOP, width=f"{end - start:.1f}", height=HEIGHT - TOP - BOTTOM, class_="hit"
        )
