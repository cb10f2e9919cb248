"""The interface of a tracker, and the trackers by name, whose packages are imported when they are used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from raypar.actors.specs.types import Tracker
from raypar.paths import TENSORBOARD, absolute

_GROUPS: Mapping[str, str] = {  # of figures that are not in "train" or "eval"
    **dict.fromkeys(("tokens_per_s", "step_ms", "bubble", "communication", "overlap"), "time"),
    **dict.fromkeys(("peak_memory", "in_flight"), "memory"),
}


class Sink(Protocol):
    """Receives the figures of a run in the driver.

    If a method raises, a warning is logged and the sink is not called again.
    """

    def begin(self, config: dict[str, Any]) -> None:
        """Start a run.

        Args:
            config: The run's configuration as plain tables.
        """

    def write(self, outcome: dict[str, Any], step: int) -> None:
        """Add the figures of a step or an evaluation.

        Args:
            outcome: ``Report.to_dict`` or ``Evaluation.to_dict``.
            step: Number of steps taken, the evaluated or just taken step counted from 1.
        """

    def close(self) -> None:
        """End the run."""


def scalars(outcome: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an outcome by name, in groups: ``train/loss``, ``eval/loss``, ``time/step_ms``.

    A tuple over pipeline ranks becomes ``memory/peak_memory/pp0`` and so on, the auxiliary losses become
    ``train/aux/switch``, and the user's metrics ``eval/accuracy``.
    """
    found: dict[str, float] = {}
    usual = "eval" if "val_loss" in outcome else "train"
    for name, value in outcome.items():
        tag = f"{_GROUPS.get(name, usual)}/{name.removeprefix('val_')}"
        if isinstance(value, int | float) and name not in ("step", "steps_taken", "by_hand"):
            found[tag] = float(value)
        elif isinstance(value, tuple | list):
            found |= {f"{tag}/pp{rank}": float(each) for rank, each in enumerate(value)}
        elif name in ("aux", "metrics"):
            inside = tag if name == "aux" else usual
            found |= {f"{inside}/{kind}": float(each) for kind, each in value.items() if each is not None}
    return found


def sink_of(tracker: Tracker, run: str, folder: str | None, step: int, job: str) -> Sink:
    """Make the sink of a tracker.

    Args:
        tracker: The tracker's name.
        run: The run's name.
        folder: The run folder, or None; TensorBoard needs one.
        step: Number of steps taken before.
        job: The job's name, which no other job has.

    Returns:
        The sink.
    """
    module = importlib.import_module(f"raypar.reporting.trackers.{'gauges' if tracker == 'ray' else tracker}")
    sink: Sink
    if tracker == "tensorboard":
        assert folder is not None
        sink = module.TensorBoard(absolute(folder) / TENSORBOARD, step)
    elif tracker == "wandb":
        sink = module.Wandb(run, folder)
    elif tracker == "mlflow":
        sink = module.MLflow(run)
    else:
        sink = module.Gauges(run, job)
    return sink
