"""The tracker Weights & Biases. Its own environment variables (WANDB_MODE and others) say where it sends figures."""

from __future__ import annotations

import importlib
from typing import Any

from raypar.reporting.trackers.tracker import scalars


class Wandb:
    """A sink that writes to a run of W&B.

    Args:
        name: The run's name.
        folder: The folder in which W&B keeps its files, or None for its default.
    """

    def __init__(self, name: str, folder: str | None) -> None:
        self._name, self._folder = name, folder
        self._run: Any = None

    def begin(self, config: dict[str, Any]) -> None:
        self._run = importlib.import_module("wandb").init(name=self._name, dir=self._folder, config=config)

    def write(self, outcome: dict[str, Any], step: int) -> None:
        self._run.log({"step": step, **scalars(outcome)})  # W&B's own step can't go back, ours may

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
