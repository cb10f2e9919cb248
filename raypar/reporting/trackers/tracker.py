"""What a tracker is told, and in which form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    """Takes the figures of a run as they come, in the driver. What it raises is a warning, and it is told no more."""

    def begin(self, config: dict[str, Any]) -> None:
        """The run begins; its configuration as plain tables."""

    def write(self, outcome: dict[str, Any], step: int) -> None:
        """A step or an evaluation is over: ``Report.to_dict`` or ``Evaluation.to_dict``."""

    def close(self) -> None:
        """The run is over."""


def scalars(outcome: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an outcome by name; those of each pipeline rank as ``peak_memory/pp0``, ``peak_memory/pp1``."""
    found: dict[str, float] = {}
    for name, value in outcome.items():
        if isinstance(value, int | float) and name != "step":
            found[name] = float(value)
        elif isinstance(value, tuple | list):
            found |= {f"{name}/pp{rank}": float(each) for rank, each in enumerate(value)}
    return found
