"""What lies where in a run folder."""

from __future__ import annotations

from pathlib import Path

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
    return (folder / RUN).is_symlink() or (folder / RUN).exists()
