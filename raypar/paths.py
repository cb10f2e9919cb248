"""Names of files and checkpoints in a run folder."""

from __future__ import annotations

import os
import re
from os import PathLike
from pathlib import Path
from uuid import uuid4

from raypar.actors.machine.files import expanded

_STEP = re.compile(r"step-([0-9]{8,15})")
_ASIDE = re.compile(r"\.step-[0-9]{8,15}\.[0-9a-f]{32}")


def step_folder_name(step: int) -> str:
    """Return the name of the checkpoint folder after ``step`` steps, such as ``step-00000100``."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint folder's name; None if it is not such a name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and name == step_folder_name(int(found[1])) else None


def aside_of(step: int) -> str:
    """Return a new hidden folder name, for a checkpoint that is being written or removed."""
    return f".{step_folder_name(step)}.{uuid4().hex}"


def is_aside(name: str) -> bool:
    """Return whether a name is one of ``aside_of``."""
    return _ASIDE.fullmatch(name) is not None


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return step and path of every checkpoint in a folder, sound or not, newest first. Raises OSError."""
    steps = ((step_of(path.name), path) for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(((step, path) for step, path in steps if step is not None), reverse=True)


RUN = "run.toml"  # the resolved run
METRICS = "metrics.jsonl"  # one line per step and per evaluation: their ``to_dict``
FAILURES = "failures.jsonl"  # one line per failure that the run has survived, or that has ended it
MOST_METRICS = 1 << 30  # bytes: the largest metrics file that a resumed run accepts
SCHEDULE = "schedule.csv"  # the lowered training schedule, in torch's format
TIMELINE = "timeline.json"  # {"step": n, "timelines": [{"actions": [[rank, actor, "1F0", start, end, bytes, bucket]]}]}
FORECAST = "forecast.json"  # the prediction of a step before the run: its source, seconds, peaks and actions
LEDGER = "ledger.json"  # {actor: {"pp send": [calls, bytes, seconds]}}
PROVENANCE = "provenance.json"  # versions, host, commit and command line of the run, and of each time it was resumed
LOG = "log.txt"  # the messages of the logger "raypar"
CHECKPOINTS = "checkpoints"  # folder of the checkpoints
PROFILES = "profile"  # folder of the steps that were profiled: a trace of each actor, and their measured times
PROFILED_TIMES = "timelines.jsonl"  # in that folder: a line like TIMELINE for each step, with its time of day
TENSORBOARD = "tensorboard"  # folder of event files, if the run is tracked by TensorBoard
REPORT = "report.html"  # the page of raypar report
COMPARISON = "comparison.html"  # the page of raypar report with several runs, in the folder of the first
TRACE = "trace.json"  # the trace of raypar trace

TRAINING_FILES = (RUN, METRICS, SCHEDULE, TIMELINE, LEDGER)  # with any of these, a folder holds a run
RUN_FILES = (*TRAINING_FILES, FAILURES, FORECAST, PROVENANCE, LOG)  # all files that a run itself writes into its folder

RUNS = "runs"  # the folder in which "auto" creates a new run folder
AUTO = "auto"


def holds_run(folder: Path) -> bool:
    """Return whether a folder is a run folder: a run has started in it."""
    return os.path.lexists(folder / RUN)


def run_folder_of(checkpoint: Path) -> Path | None:
    """Return the run folder of a checkpoint; None if it is in none."""
    above = checkpoint.parent
    return above.parent if above.name == CHECKPOINTS and holds_run(above.parent) else None


def checkpoints_in(folder: Path) -> Path:
    """Return the folder of checkpoints: the subfolder of a run folder, else the folder itself."""
    return folder / CHECKPOINTS if holds_run(folder) else folder


def absolute(folder: str | PathLike[str]) -> Path:
    """Return a user's path as an absolute path, with ``~`` expanded."""
    return expanded(folder).absolute()
