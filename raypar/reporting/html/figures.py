"""The figures of a run folder, and their formats."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from raypar.reporting.run_folder.read import Past


@dataclass(frozen=True)
class History:
    """The steps and evaluations of a run, sorted by step. If a resumed run repeated a step, the last one counts.

    Attributes:
        steps: One dict for each step (``Report.to_dict``).
        evaluations: One dict for each evaluation (``Evaluation.to_dict``).
    """

    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @classmethod
    def of(cls, past: Past) -> History:
        steps: dict[int, dict[str, Any]] = {}
        evaluations: dict[int, dict[str, Any]] = {}
        for line in past.metrics:
            (evaluations if "val_loss" in line else steps)[line["step"]] = line
        return cls(_ordered(steps), _ordered(evaluations))

    def points(self, name: str) -> list[tuple[float, float]]:
        """Return ``(number of steps taken, figure)`` of every step."""
        return [(line["step"] + 1, line[name]) for line in self.steps]

    def validation(self) -> list[tuple[float, float]]:
        """Return ``(number of steps taken before, loss)`` of every evaluation."""
        return [(line["step"], line["val_loss"]) for line in self.evaluations]

    def median(self, name: str) -> float:
        """Return the median of a figure over all steps but the first, which also warms up."""
        return float(statistics.median(line[name] for line in self.steps[1:] or self.steps))

    def peaks(self) -> list[int]:
        """Return the largest memory of each pipeline rank over all steps, in bytes."""
        of_steps = (line["peak_memory"] for line in self.steps)  # a resumed run may have other ranks
        return [max(sizes) for sizes in zip_longest(*of_steps, fillvalue=0)]


def headline(past: Past, history: History) -> list[tuple[str, str]]:
    """Return the figures at the top of the page.

    Args:
        past: The content of the run folder.
        history: The steps and evaluations of the same folder.

    Returns:
        ``(name, formatted value)`` of each figure.
    """
    rows = [("steps", f"{len(history.steps):,} of {past.config['steps']:,}")]
    if history.steps:
        rows.append(("train loss", f"{history.steps[-1]['loss']:.4f}"))
    if history.evaluations:
        rows.append(("validation loss", f"{history.evaluations[-1]['val_loss']:.4f}"))
    if history.steps:
        rows += [
            ("tokens/s, median", f"{history.median('tokens_per_s'):,.0f}"),
            ("bubble, median", share(history.median("bubble"))),
            ("peak memory of a rank", size(max(history.peaks(), default=0))),
            ("time in steps", duration(sum(line["step_ms"] for line in history.steps) / 1e3)),
        ]
    return rows


def size(count: float) -> str:
    """Format bytes: 1.5 MiB."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(4, int(math.log2(count) / 10))
    return f"{count / 1024**power:,.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def duration(seconds: float) -> str:
    """Format seconds: 1 h 02 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def share(part: float) -> str:
    """Format a fraction of 1 as per cent, without a trailing ".0"."""
    return f"{100 * part:.1f}".removesuffix(".0") + "%"


def significant(value: float) -> str:
    """Format a number with four digits and a separator for thousands."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def flat(table: dict[str, Any], below: str = "") -> dict[str, object]:
    """Flatten nested tables into one, with dots in its keys.

    Args:
        table: The tables.
        below: Text that all keys begin with.
    """
    found: dict[str, object] = {}
    for key, value in table.items():
        found |= flat(value, f"{below}{key}.") if isinstance(value, dict) else {f"{below}{key}": value}
    return found


def _ordered(lines: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    return [lines[step] for step in sorted(lines)]
