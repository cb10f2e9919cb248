"""What lies where in a run folder."""

from __future__ import annotations

import os
import re
from pathlib import Path
from uuid import uuid4

from raypar.actors.files import expanded

_STEP = re.compile(r"step-([0-9]{8,15})")
_ASIDE = re.compile(r"\.step-[0-9]{8,15}\.[0-9a-f]{32}")


def name_of(step: int) -> str:
    """The folder of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a folder is named after; None if it is not named as a checkpoint."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and name == name_of(int(found[1])) else None


def aside_of(step: int) -> str:
    """A new hidden name, for a checkpoint that is not one yet or not one any more."""
    return f".{name_of(step)}.{uuid4().hex}"


def is_aside(name: str) -> bool:
    return _ASIDE.fullmatch(name) is not None


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of every checkpoint in a folder, sound or not, the newest first. Raises OSError."""
    steps = ((step_of(path.name), path) for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(((step, path) for step, path in steps if step is not None), reverse=True)


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
