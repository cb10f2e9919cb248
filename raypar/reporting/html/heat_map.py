"""A heat map in SVG and HTML without scripts: figures by row and step, darker where they are larger."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from raypar.reporting.html.markup import concatenated, element

COLUMNS = 60  # most columns of a map; more steps are put together
_SHADES = (0.16, 0.32, 0.52, 0.75, 1.0)  # opacities
_MOST_HEIGHT, _ROW = 22.0, 1.1  # rem


@dataclass(frozen=True)
class Cell:
    """One figure of a heat map.

    Attributes:
        value: The figure, 0 or more.
        text: What it is of, for its tooltip.
    """

    value: float
    text: str


@dataclass(frozen=True)
class Scale:
    """Which figures have which of the five shades.

    Attributes:
        limits: The four limits between the shades of figures that are not zero.
        texts: The legend of the shades.
    """

    limits: tuple[float, float, float, float]
    texts: tuple[str, str, str, str, str]


SHARES = Scale((1e-4, 1e-3, 1e-2, 1e-1), ("under 0.01 %", "under 0.1 %", "under 1 %", "under 10 %", "more"))


def heat_map(
    rows: Sequence[str],
    cells: Mapping[int, Mapping[str, Cell]],
    color: str,
    scale: Scale = SHARES,
    most_columns: int = COLUMNS,
) -> Markup:
    """Draw a heat map. Where several steps share a column, the largest figure is drawn.

    Args:
        rows: Names of the rows, from top to bottom.
        cells: By step and row, the figures; sorted by step.
        color: The CSS class of the cells.
        scale: The shades.
        most_columns: Most columns; more steps are put together.

    Returns:
        The map.
    """
    steps = list(cells)
    edges = [round(part * len(steps) / most_columns) for part in range(most_columns + 1)]
    columns = [[step] for step in steps] if len(steps) <= most_columns else [steps[a:b] for a, b in pairwise(edges)]
    height = max(0.35, min(_ROW, _MOST_HEIGHT / len(rows)))
    apart = math.ceil(0.9 / height)  # names of rows are written where they fit
    names = [
        element("span", name, title=name, style=f"top: {row * height:.2f}rem")
        for row, name in enumerate(rows)
        if row % apart == 0
    ]
    drawn = element(
        "svg",
        *_drawn(rows, columns, cells, color, scale),
        viewBox=f"0 0 {len(columns)} {len(rows)}",
        preserveAspectRatio="none",
        style=f"height: {height * len(rows):.2f}rem",
        role="img",
        aria_label="figures by row and step",
    )
    middle = [element("span", f"step {steps[0]:,}")] + [element("span", f"{steps[-1]:,}")] * (len(steps) > 1)
    return element(
        "div",
        element("div", *names, class_="names"),
        drawn,
        element("div", *middle, class_="ends"),
        class_="heat",
    )


def shades(color: str, scale: Scale = SHARES) -> Markup:
    """Draw the legend of the shades."""
    return concatenated(
        *(
            element("span", element("i", class_=f"shade {color}", style=f"opacity: {shade}"), text)
            for shade, text in zip(_SHADES, scale.texts, strict=True)
        )
    )


def _drawn(
    rows: Sequence[str],
    columns: Sequence[Sequence[int]],
    cells: Mapping[int, Mapping[str, Cell]],
    color: str,
    scale: Scale,
) -> Iterator[Markup]:
    """Draw the cells that are not zero."""
    yield element("rect", width=len(columns), height=len(rows), class_="ground")
    for x, column in enumerate(columns):
        for y, row in enumerate(rows):
            found = [(step, cells[step][row]) for step in column if row in cells[step]]
            step, cell = max(found, key=lambda one: one[1].value, default=(0, Cell(0.0, "")))
            if cell.value > 0:
                shade = _SHADES[sum(cell.value >= limit for limit in scale.limits)]
                tip = element("title", f"step {step:,}, {row}: {cell.text}")
                yield element("rect", tip, x=x, y=y, width=1, height=1, fill_opacity=shade, class_=f"cell {color}")
