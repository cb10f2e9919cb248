"""What lies where in a run folder."""

from __future__ import annotations

import os
from pathlib import Path

from raypar.actors.disk import expanded

RUN = "run.toml"  # the resolved run
METRICS = "metrics.jsonl"  # a line a step and an evaluation: their ``to_dict``
SCHEDULE = "schedule.csv"  # the lowered training schedule, as torch writes it
TIMELINE = "timeline.json"  # {"step": n, "timelines": [{"actions": [[rank, actor, "1F0", start, end, bytes, bucket]]}]}
LEDGER = "ledger.json"  # {actor: {"pp send": [calls, bytes]}}
LOG = "log.txt"  # what the logger "raypar" said
CHECKPOINTS = "checkpoints"  # a folder of them
TENSORBOARD = "tensorboard"  # event files, if the run is tracked there


def holds_run(folder: Path) -> bool:
    """Whether a run has begun in a folder."""
    return os.path.lexists(folder / RUN)


def home_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in, if it does."""
    above = checkpoint.parent
    return above.parent if above.name == CHECKPOINTS and holds_run(above.parent) else None


def checkpoints_in(folder: Path) -> Path:
    """Where the checkpoints of a folder are: of a run folder below it, else in it."""
    return folder / CHECKPOINTS if holds_run(folder) else folder


def absolute(folder: str | Path) -> Path:
    """The path that a user means."""
    return expanded(folder).absolute()
