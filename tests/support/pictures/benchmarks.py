"""The chart of docs/benchmarks.md, from its tables: tokens/s of raypar and of its peers, with their ranges."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.support.pictures.templates import filled

_PAGE = Path(__file__).parents[3] / "docs/benchmarks.md"
_SHOWN = {  # by heading: the size, and the rows of its table
    "Replicas (dp=2)": ("dp", "raypar dp=2", "torch DDP", "Ray Train, DDP"),
    "Pipeline (pp=2), GPipe": ("pp", "raypar pp=2 gpipe", "torch GPipe"),
    "Pipeline (pp=2), 1F1B": ("pp", "raypar pp=2 1f1b", "torch 1F1B"),
    "Pipeline (pp=2), interleaved": ("pp", "raypar pp=2 interleaved", "torch Interleaved1F1B, v=2"),
    "Divided layers (tp=2)": ("tp", "raypar tp=2", "torch DTensor"),
}
_LEFT, _RIGHT, _BAR, _HEAD = 215, 650, 22, 30  # pixels: where bars begin and end, the height of a bar and of a heading


class Bar(NamedTuple):
    """One contestant: its median speed and its slowest and fastest round, in tokens/s, and its places in pixels."""

    who: str
    speed: int
    top: int
    end: float
    low: float
    high: float

    @property
    def is_ours(self) -> bool:
        return self.who.startswith("raypar")


def benchmarks() -> str:
    """Return the chart as SVG."""
    page = _PAGE.read_text()
    speeds = {name: _speeds(page, *shown) for name, shown in _SHOWN.items()}
    scale = (_RIGHT - _LEFT) / max(high for rows in speeds.values() for *_, high in rows)
    top, groups = 34, []
    for name, rows in speeds.items():
        bars = [
            Bar(who, speed, top + _HEAD + _BAR * index, *(_LEFT + scale * value for value in (speed, low, high)))
            for index, (who, speed, low, high) in enumerate(rows)
        ]
        groups.append((name, top + _HEAD - 8, bars))
        top = bars[-1].top + _BAR
    return filled("benchmarks.svg.jinja", groups=groups, height=top + 12, left=_LEFT)


def _speeds(page: str, size: str, *shown: str) -> list[tuple[str, int, int, int]]:
    """Each contestant's name, median, slowest and fastest, in tokens/s."""
    table = page.partition(f"\n{size}: a GPT of ")[2].partition("\n\n")[2].partition("\n\n")[0]
    figures = re.findall(r"^\| (.+?) \| ([\d,]+) \| ([\d,]+) to ([\d,]+) \|", table, re.MULTILINE)
    by_name = {who: [int(figure.replace(",", "")) for figure in row] for who, *row in figures}
    return [(who, *by_name[who]) for who in shown]
