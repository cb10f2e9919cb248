"""The tracker TensorBoard: event files in the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from raypar.config.toml import flat
from raypar.reporting.trackers.tracker import scalars


class TensorBoard:
    """A sink that writes event files.

    Args:
        folder: The folder of the files.
        step: Number of steps taken before. Events of later steps that are already in the folder are removed.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def begin(self, config: dict[str, Any]) -> None:
        rows = (f"| {name} | {str(value).replace('|', '/')} |" for name, value in flat(config).items())
        self._writer.add_text("config", "\n".join(["| field | value |", "| --- | --- |", *rows]))

    def write(self, outcome: dict[str, Any], step: int) -> None:
        for name, value in scalars(outcome).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
